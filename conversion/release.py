"""A list of checkpoints, each converted and certified: goes on after a failure, and can be resumed."""

import dataclasses
import json
import os
from collections import Counter
from typing import Any

from conversion import certificate, judging
from vit_keras import converter
from vit_keras.checkpoints.files import read_json
from vit_keras.progress import progress_bar


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one target of one checkpoint.

    Args:
        name: of the checkpoint in the manifest.
        target: one of `vit_keras.converter.TARGETS`.
        state: "done", "kept" (done by an earlier run) or "failed".
        detail: the largest difference on the logits, or the reason.
    """

    name: str
    target: str
    state: str
    detail: str


def release(path: str) -> list[Outcome]:
    """Convert and certify what a manifest lists.

    Args:
        path: a JSON file `{"out": FOLDER, "checkpoints": [{"name": …, "source": …, "to": […], …}]}`. Paths are relative
            to the manifest; further keys of a checkpoint are options of `vit_keras.convert`. A target lies in
            `OUT/NAME/TARGET` with its suffix, its certificate beside it.

    Returns:
        One `Outcome` a target, in the manifest's order.

    Raises:
        ValueError: the manifest is not of this form.
    """
    manifest = read_json(path)
    base = os.path.dirname(os.path.abspath(path))
    jobs = [(entry, to) for entry in _entries(manifest, path) for to in entry["to"]]
    outcomes = []
    with progress_bar("Releasing", len(jobs)) as advance:
        for entry, to in jobs:
            outcomes.append(_release_one(base, manifest["out"], entry, to))
            advance(1)
    return outcomes


def _entries(manifest: dict[str, Any], path: str) -> list[dict[str, Any]]:
    entries = manifest.get("checkpoints")
    if not isinstance(manifest.get("out"), str) or not isinstance(entries, list):
        raise ValueError(f'{path}: expected {{"out": FOLDER, "checkpoints": [...]}}.')
    for entry in entries:
        targets = entry.get("to") if isinstance(entry, dict) else None
        named = isinstance(targets, list) and all(isinstance(entry.get(key), str) for key in ("name", "source"))
        if not named or any(to not in converter.TARGETS for to in targets) or not _is_file_name(entry["name"]):
            raise ValueError(
                f'{path}: expected "name" (of a folder), "source" and "to", a list of {", ".join(converter.TARGETS)}. '
                f"Received: {json.dumps(entry)}"
            )
    twice = [name for name, count in Counter(entry["name"] for entry in entries).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: expected names of one checkpoint each. Received twice: {', '.join(twice)}")
    return entries


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and os.path.basename(name) == name and "\0" not in name


def _release_one(base: str, out: str, entry: dict[str, Any], to: str) -> Outcome:
    source = os.path.join(base, entry["source"])
    folder = os.path.join(base, out, entry["name"])
    target = os.path.join(folder, to + converter.SUFFIXES.get(to, ""))
    options = {name: value for name, value in entry.items() if name not in ("name", "source", "to")}
    try:
        judging.check_options(options.keys() - {"accept_numerics", "format"})
        if _is_done(source, target, options):
            return Outcome(entry["name"], to, "kept", "")
        os.makedirs(folder, exist_ok=True)
        converter.convert(source, to, target, force=True, **options)
        result = certificate.certify(source, target, **options)
        certificate.save(result, f"{target}.certificate.json")
    except Exception as error:  # whatever it is, the others go on
        return Outcome(entry["name"], to, "failed", (str(error) or type(error).__name__).splitlines()[0])
    if result["problems"]:
        return Outcome(entry["name"], to, "failed", result["problems"][0])
    final = "logits" if "logits" in result["stages"] else "features"
    return Outcome(entry["name"], to, "done", f"{result['stages'][final]['max']:.1e}")


def _is_done(source: str, target: str, options: dict[str, Any]) -> bool:
    """Whether an earlier run certified this very target of this very source, with these options."""
    try:
        earlier = read_json(f"{target}.certificate.json")
        return (
            os.path.exists(target)
            and earlier["verdict"] == "pass"
            and earlier["options"] == {"accept_numerics": False, **options}
            and earlier["target"]["sha256"] == certificate.digests(target)
            and earlier["source"]["sha256"] == certificate.digests(source)
        )
    except (ValueError, KeyError, TypeError, OSError):
        return False
