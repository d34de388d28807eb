"""Memory and time of converting full-size checkpoints: `python benchmarks/convert_memory.py [vit_l16 ...]`.

Writes the `.npz` of a model with random weights (the exporter's), then converts it to Keras and to Hugging Face in
fresh processes, and prints each one's peak memory, less that of a process that only imports the library, as a multiple
of the file, and the share of the time that reading and writing the same bytes takes on this disk.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MEASURED = """
import json, resource, sys, time
import vit_keras
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
{work}
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([idle * 1024, peak * 1024, seconds]))
"""


def measure(work: str, *arguments: object) -> tuple[float, float, float]:
    """Idle and peak memory in bytes, and seconds, of `work` in a fresh process."""
    command = [sys.executable, "-c", MEASURED.format(work=work), *map(str, arguments)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return tuple(json.loads(output.splitlines()[-1]))


def disk_seconds(source: Path, copy: Path) -> float:
    """Reading a file and writing it again, to the disk and not to its cache."""
    start = time.perf_counter()
    with open(source, "rb") as read, open(copy, "wb") as written:
        while block := read.read(2**24):
            written.write(block)
        written.flush()
        os.fsync(written.fileno())
    return time.perf_counter() - start


def main() -> None:
    for name in sys.argv[1:] or ["vit_b16", "vit_l16"]:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "source.npz")
            make = "vit_keras.save_npz(vit_keras.create(sys.argv[1], pretrained=False, image_size=224), sys.argv[2])"
            measure(make, name, source)
            size = source.stat().st_size
            print(f"{name}: {size / 1e9:.2f} GB")
            disk = disk_seconds(source, Path(folder, "copy"))
            for to, out in (("keras", "out.keras"), ("huggingface", "hf"), ("timm", "timm")):
                work = "vit_keras.convert(sys.argv[1], sys.argv[2], sys.argv[3])"
                idle, peak, seconds = measure(work, source, to, Path(folder, out))
                print(
                    f"  to {to}: peak {(peak - idle) / size:.2f} x the file ({peak / 1e9:.2f} GB in all), "
                    f"{seconds:.0f} s, of which the disk {min(disk / seconds, 1):.0%}"
                )


if __name__ == "__main__":
    main()
