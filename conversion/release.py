"""A list of checkpoints, each converted and certified: goes on after a failure, and can be resumed."""

import dataclasses
import json
import os
from typing import Any

from conversion import certificate
from vit_keras import converter
from vit_keras.checkpoints.files import read_json
from vit_keras.progress import progress_bar

SUFFIXES = {**converter.SUFFIXES}


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
        if not named or not set(targets) <= set(converter.TARGETS) or os.path.basename(entry["name"]) != entry["name"]:
            raise ValueError(
                f'{path}: expected "name", "source" and "to", a list of {", ".join(converter.TARGETS)}. '
                f"Received: {json.dumps(entry)}"
            )
    return entries


def _release_one(base: str, out: str, entry: dict[str, Any], to: str) -> Outcome:
    source = os.path.join(base, entry["source"])
    folder = os.path.join(base, out, entry["name"])
    target = os.path.join(folder, to + SUFFIXES.get(to, ""))
    options = {name: value for name, value in entry.items() if name not in ("name", "source", "to")}
    try:
        if _is_done(source, target):
            return Outcome(entry["name"], to, "kept", "")
        os.makedirs(folder, exist_ok=True)
        converter.convert(source, to, target, force=True, **options)
        result = certificate.certify(source, _judged(to, target), **_changes(options))
        certificate.save(result, f"{target}.certificate.json")
    except Exception as error:  # whatever it is, the others go on
        return Outcome(entry["name"], to, "failed", str(error).splitlines()[0])
    last = list(result["stages"].values())[-1]
    state = "done" if result["verdict"] == "pass" else "failed"
    return Outcome(entry["name"], to, state, f"{last['max']:.1e}")


def _judged(to: str, target: str) -> str | None:
    """What of a target can be read back into a Keras model; weights alone and SavedModels are the source's model."""
    return None if to in ("weights", "savedmodel") else target


def _changes(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "accept_numerics"}


def _is_done(source: str, target: str) -> bool:
    """Whether an earlier run certified this very target of this very source."""
    try:
        earlier = read_json(f"{target}.certificate.json")
        judged = earlier["target"] is None or earlier["target"]["sha256"] == certificate.digests(target)
        return (
            os.path.exists(target)
            and earlier["verdict"] == "pass"
            and judged
            and (earlier["source"]["sha256"] == certificate.digests(source))
        )
    except (ValueError, KeyError, TypeError, OSError):
        return False
