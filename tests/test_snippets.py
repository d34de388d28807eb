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


RUN = """
import os, sys
for folder in sys.argv[1:]:
    os.chdir(folder)
    page = os.path.basename(folder)
    exec(compile(open("snippets.py", encoding="utf-8").read(), page, "exec"), {"__name__": page})
"""


# A process for half of the pages: starting one takes longer than most pages do.
@pytest.mark.parametrize("half", [0, 1])
def test_snippets_run(half, tmp_path):
    pages = PAGES[half::2]
    for page in pages:
        folder = tmp_path / page.name
        folder.mkdir()
        shutil.copy(GOLDEN / "vit_token_prelinen.npz", folder / "tiny.npz")
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)).save(folder / "photo.png")
        (folder / "labels.txt").write_text("".join(f"class {i}\n" for i in range(10)))
        found = snippets(page)
        assert found, f"{page.name} has no snippet"
        (folder / "snippets.py").write_text("\n".join(found), encoding="utf-8")
    run_python(RUN, *(tmp_path / page.name for page in pages))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
