"""Every Python snippet of the README and the docs runs, in order, one namespace a page."""

import re
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.conftest import GOLDEN, ROOT, run_python

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page, tmp_path):
    shutil.copy(GOLDEN / "vit_token_prelinen.npz", tmp_path / "tiny.npz")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)).save(tmp_path / "photo.png")
    (tmp_path / "labels.txt").write_text("".join(f"class {i}\n" for i in range(10)))
    found = snippets(page)
    assert found, f"{page.name} has no snippet"
    run_python("\n".join(["import os, sys", "os.chdir(sys.argv[1])", *found]), tmp_path)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
