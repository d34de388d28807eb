"""Checkpoints of other codes, in and out, on one engine."""

from vit_keras.checkpoints.arrays import CheckpointError as CheckpointError
from vit_keras.checkpoints.cache import CacheEntry as CacheEntry
from vit_keras.checkpoints.convert import LoadReport as LoadReport
from vit_keras.checkpoints.convert import load_weights_from as load_weights_from
from vit_keras.checkpoints.download import DownloadError as DownloadError
from vit_keras.checkpoints.download import fetch as fetch
from vit_keras.checkpoints.export import export_arrays as export_arrays
from vit_keras.checkpoints.export import save_checkpoint as save_checkpoint
from vit_keras.checkpoints.export import save_npz as save_npz
from vit_keras.checkpoints.facts import Facts as Facts
from vit_keras.checkpoints.source import Checkpoint as Checkpoint
from vit_keras.checkpoints.source import checkpoint_of as checkpoint_of
from vit_keras.checkpoints.source import open_checkpoint as open_checkpoint
