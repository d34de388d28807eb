"""Position tables between grids: against the original code's outputs, Pillow, SciPy and plain loops."""

import math

import numpy as np
import pytest
import scipy.ndimage
from keras import ops
from PIL import Image

from tests.conftest import golden
from vit_keras.layers import interpolation_matrix, resize_table, square_grid
from vit_keras.records import Resize

CASES = sorted({key.rpartition("/")[0] for key in golden("posembed_resize")})
RULES = [Resize(), Resize("bicubic"), Resize("bicubic", offset=0.1), Resize("antialiased_bicubic")]
GRIDS = [((4, 4), (6, 6)), ((4, 4), (2, 8)), ((8, 8), (4, 4)), ((3, 5), (7, 2)), ((1, 1), (3, 2)), ((5, 4), (1, 1))]


@pytest.mark.parametrize("case", CASES)
def test_original_cases(case):
    data = golden("posembed_resize")
    old, new = (int(part.split("x")[0]) for part in case.split("_")[0:3:2])
    found = resize_table(data[f"{case}/in"][0], (old, old), (new, new), Resize(), prefix=int(case.endswith("_tok")))
    np.testing.assert_allclose(found, data[f"{case}/out"][0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("old", "new"), [grids for grids in GRIDS if min(grids[1]) > 1])
def test_align_corners_is_scipys_zoom(old, new):
    table = np.random.default_rng(0).normal(size=(*old, 3))
    expected = scipy.ndimage.zoom(table, (new[0] / old[0], new[1] / old[1], 1), order=1)
    found = resize_table(table.reshape(-1, 3), old, new, Resize())
    np.testing.assert_allclose(found, expected.reshape(-1, 3), atol=1e-9)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_antialiased_bicubic_is_pillows(old, new):
    table = np.random.default_rng(0).normal(size=old).astype("float32")
    expected = np.asarray(Image.fromarray(table).resize(new[::-1], Image.Resampling.BICUBIC))
    found = resize_table(table.reshape(-1, 1), old, new, Resize("antialiased_bicubic"))
    np.testing.assert_allclose(found, expected.reshape(-1, 1), atol=1e-5)


def bicubic_by_hand(signal, new, offset):
    """PyTorch's bicubic in one dimension: a = -0.75, half-pixel centres, borders replicated."""

    def kernel(x):
        x, a = abs(x), -0.75
        if x <= 1:
            return (a + 2) * x**3 - (a + 3) * x**2 + 1
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0

    scale, result = len(signal) / (new + offset), []
    for target in range(new):
        place = (target + 0.5) * scale - 0.5
        taps = range(math.floor(place) - 1, math.floor(place) + 3)
        result.append(sum(kernel(place - tap) * signal[min(max(tap, 0), len(signal) - 1)] for tap in taps))
    return np.array(result)


@pytest.mark.parametrize("offset", [0.0, 0.1])
@pytest.mark.parametrize(("old", "new"), [(4, 7), (37, 16), (8, 4), (1, 3), (5, 1), (6, 6)])
def test_bicubic_by_hand(old, new, offset):
    signal = np.random.default_rng(0).normal(size=old)
    found = interpolation_matrix(new, old, Resize("bicubic", offset)) @ signal
    np.testing.assert_allclose(found, bicubic_by_hand(signal, new, offset), atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_rows_sum_to_one_and_prefix_is_kept_in_graph_and_out(rule, old, new):
    table = np.random.default_rng(0).normal(size=(2 + math.prod(old), 4)).astype("float32")
    found = resize_table(table, old, new, rule, prefix=2)
    assert found.shape == (2 + math.prod(new), 4)
    assert found.dtype == table.dtype
    assert np.array_equal(found[:2], table[:2])
    in_graph = resize_table(ops.convert_to_tensor(table), old, new, rule, prefix=2, xp=ops)
    np.testing.assert_allclose(in_graph, found, atol=1e-5)
    for length, source in zip(new, old):
        np.testing.assert_allclose(interpolation_matrix(length, source, rule).sum(axis=1), 1.0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equal_grids_are_untouched(rule):
    table = np.ones((12, 2), "float32")
    assert resize_table(table, (3, 4), (3, 4), rule) is table


def test_rows_run_along_the_height():
    """A ramp in the rows of a 4x4 grid stays one at 4x6: varying along the height, constant along the width."""
    ramp = np.repeat(np.arange(4.0), 4)[:, None]
    found = resize_table(ramp, (4, 4), (4, 6), Resize()).reshape(4, 6)
    np.testing.assert_allclose(found, np.repeat(np.arange(4.0), 6).reshape(4, 6))


def test_shrinking_differs_with_and_without_antialias():
    table = np.random.default_rng(0).normal(size=(64, 2))
    both = [resize_table(table, (8, 8), (4, 4), Resize(method)) for method in ("bicubic", "antialiased_bicubic")]
    assert np.abs(both[0] - both[1]).max() > 0.1


def test_square_grid():
    assert [square_grid(count) for count in (0, 1, 2, 16, 24)] == [None, (1, 1), None, (4, 4), None]


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="must be one of 'align_corners', 'bicubic', 'antialiased_bicubic'"):
        Resize.of("lanczos")
