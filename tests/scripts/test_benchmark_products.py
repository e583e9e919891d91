"""Products with 8-bit weights beside bfloat16."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark_products

from heads import create_heads
from inference import Target
from tests.tiny_targets import tiny_target


def test_8_bit_products_are_nearly_exact() -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(32, 64), torch.randn(3, 64).bfloat16()
    product = benchmark_products.quantised(weight.bfloat16())(inputs)
    exact = inputs.float() @ weight.T
    assert product.shape == exact.shape
    assert (product.float() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_line_for_each_matrix_and_number_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_heads("medusa", Target(tiny_target("llama")), num_heads=1).save_pretrained(tmp_path / "heads")
    words = ["--heads", str(tmp_path / "heads"), "--rows", "1", "--repeats", "2"]
    assert benchmark_products.main(words) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["heads.0.blocks.0.linear", "heads.0.lm_head"]


def test_no_heads_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"benchmark_products.py: .*has no config.json"):
        benchmark_products.main(["--heads", str(tmp_path)])
