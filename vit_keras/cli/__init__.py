"""What the commands do, one file a command; their arguments are in `vit_keras_cli.py`."""
