"""DraftHeads and its config: what is refused, and that a save is complete or did not happen."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import modeling_utils

import draftsmith.heads as heads_package
from draftsmith.heads import DraftHeads, create_heads
from draftsmith.heads.config import FORMAT_VERSION
from draftsmith.heads.kinds.eagle3 import Eagle3Heads
from draftsmith.heads.kinds.medusa import MedusaHeads
from draftsmith.inference import Target
from tests.heads.tiny_heads import tiny_heads
from tests.processes import start_process

KNOWN_KINDS = ", ".join(sorted(heads_package.HEAD_TYPES))
NEXT = FORMAT_VERSION + 1


def edit_weights(folder: Path, **changes: Tensor | None) -> None:
    """Replaces tensors of a saved checkpoint; None removes one."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


class TestLoading:
    def test_the_kind_is_read_from_the_config(self, saved: Path) -> None:
        assert type(DraftHeads.from_pretrained(saved)) is Eagle3Heads
        assert type(DraftHeads.from_pretrained(str(saved))) is Eagle3Heads
        assert type(Eagle3Heads.from_pretrained(saved)) is Eagle3Heads
        with pytest.raises(ValueError, match="holds eagle3 heads, not MedusaHeads"):
            MedusaHeads.from_pretrained(saved)

    @pytest.mark.parametrize(
        ("name", "tensor", "message"),
        [
            ("norm.weight", None, r"missing: norm\.weight"),
            ("embed_tokens", torch.ones(2, 2), "unexpected: embed_tokens"),
            ("fc.weight", torch.ones(32, 64), r"of another shape: fc\.weight is \[32, 64\] and should be \[32, 96\]"),
        ],
    )
    def test_other_tensors(self, saved: Path, name: str, tensor: Tensor | None, message: str) -> None:
        edit_weights(saved, **{name: tensor})
        for options in ({}, {"ignore_mismatched_sizes": True}):
            with pytest.raises(ValueError, match=message):
                DraftHeads.from_pretrained(saved, **options)

    def test_tensor_that_is_not_finite(self, saved: Path) -> None:
        weight = load_file(saved / "model.safetensors")["lm_head.weight"]
        weight[3, 5] = float("nan")
        edit_weights(saved, **{"lm_head.weight": weight})
        with pytest.raises(ValueError, match=r"tensor lm_head\.weight holds NaN"):
            DraftHeads.from_pretrained(saved)

    @pytest.mark.parametrize("size", [0, -1])
    def test_truncated_file(self, saved: Path, size: int) -> None:
        content = (saved / "model.safetensors").read_bytes()
        (saved / "model.safetensors").write_bytes(content[:size])
        with pytest.raises(ValueError, match="weights file is damaged"):
            DraftHeads.from_pretrained(saved)

    def test_what_is_no_folder_of_heads(self, saved: Path) -> None:
        (saved / "config.json").unlink()
        hub = "here, and no repository of that name"
        for path, message in {
            str(saved): r"has no config\.json: give the folder",
            str(saved / "model.safetensors"): r"model\.safetensors is a file: give its folder",
            **{path: f"^the folder {path} does not exist$" for path in ("./nope", "/nope", "a/b/c", "~/nope")},
            **{name: f"there is no file or folder {name} {hub}" for name in ("nope", "org/nope")},
        }.items():
            with pytest.raises(ValueError, match=message):
                DraftHeads.from_pretrained(path)

    def test_mistyped_folder_is_not_looked_up(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(saved.parent.parent)
        parent = saved.parent.name
        with pytest.raises(ValueError, match=f"^the folder {parent}/heds .*; {parent} is a folder"):
            DraftHeads.from_pretrained(f"{parent}/heds")

    def test_loading_info(self, saved: Path) -> None:
        assert type(DraftHeads.from_pretrained(saved, output_loading_info=False)) is Eagle3Heads
        with pytest.raises(ValueError, match="got output_loading_info"):
            DraftHeads.from_pretrained(saved, output_loading_info=True)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"head_type": "eagle9"}, f"head_type 'eagle9'; this release knows {KNOWN_KINDS}"),
            ({"format_version": NEXT}, rf"format_version {NEXT}.* up to {FORMAT_VERSION}: upgrade"),
            ({"ttt_step": 3}, "unknown config key 'ttt_step' for eagle3 heads; did you mean 'ttt_steps"),
        ],
    )
    def test_other_configs(self, saved: Path, changes: dict[str, Any], message: str) -> None:
        config = json.loads((saved / "config.json").read_text())
        (saved / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=message):
            DraftHeads.from_pretrained(saved)


def save_and_die(folder: Path, moment: str) -> None:
    def die_while_writing(tensors: dict[str, Tensor], path: str, **kwargs: Any) -> None:
        Path(path).write_bytes(bytes(1000))
        os.kill(os.getpid(), signal.SIGKILL)

    def die_after_the_first_rename(path: Path, place: Path) -> None:
        os.replace(path, place)
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "writing":
        modeling_utils.safe_save_file = die_while_writing
    else:
        Path.replace = die_after_the_first_rename
    heads = DraftHeads.from_pretrained(folder)
    heads.fc.weight.data.fill_(2.0)
    heads.save_pretrained(folder)


class TestSaving:
    def test_what_the_trainer_passes(self, target: Target, tmp_path: Path) -> None:
        heads = tiny_heads("medusa", target)
        state = {name: tensor + 1 for name, tensor in heads.state_dict().items()}
        heads.save_pretrained(str(tmp_path), state_dict=dict(state), is_main_process=True)
        loaded = DraftHeads.from_pretrained(tmp_path)
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, state[name])

    def test_other_processes_write_nothing(self, target: Target, tmp_path: Path) -> None:
        create_heads("medusa", target).save_pretrained(tmp_path / "heads", is_main_process=False)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    def test_a_full_disk(self, target: Target, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = DraftHeads.from_pretrained(saved).state_dict()

        def fail(tensors: dict[str, Tensor], path: str, **kwargs: Any) -> None:
            Path(path).write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail)
        with pytest.raises(OSError, match="No space left"):
            create_heads("medusa", target).save_pretrained(saved)
        left = ["config.json", "model.safetensors", "token_counts.safetensors"]
        assert sorted(path.name for path in saved.iterdir()) == left
        assert [path.name for path in saved.parent.iterdir()] == [saved.name]
        after = DraftHeads.from_pretrained(saved).state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)

    @pytest.mark.ci
    @pytest.mark.slow  # a process of its own
    def test_a_kill(self, saved: Path) -> None:
        """Kills a process while it writes the weights, and another one between two renames; then saves once more."""
        for moment in ("writing", "renaming"):
            process = start_process(save_and_die, saved, moment)
            process.join()
            assert process.exitcode == -signal.SIGKILL
            is_new = DraftHeads.from_pretrained(saved).fc.weight.eq(2.0).all()
            assert is_new == (moment == "renaming")
        assert (saved / ".incomplete").exists()
        DraftHeads.from_pretrained(saved).save_pretrained(saved)
        left = ["config.json", "model.safetensors", "token_counts.safetensors"]
        assert sorted(path.name for path in saved.iterdir()) == left

    def test_shards_and_a_single_file_replace_each_other(self, target: Target, tmp_path: Path) -> None:
        def assert_loads(heads: DraftHeads) -> None:
            loaded = DraftHeads.from_pretrained(tmp_path).state_dict()
            assert all(torch.equal(tensor, loaded[name]) for name, tensor in heads.state_dict().items())

        sizes = ["10KB", "1GB", "20KB", "10KB", "1GB"]
        counts = []
        for seed, size in enumerate(sizes):
            heads = tiny_heads("eagle3", target, seed=seed)
            heads.save_pretrained(tmp_path, max_shard_size=size)
            assert_loads(heads)
            counts.append(len(list(tmp_path.glob("model*.safetensors"))))
            assert (tmp_path / "model.safetensors.index.json").exists() == (size != "1GB")
        assert counts[0] == counts[3] > counts[2] > counts[1] == counts[4] == 1
