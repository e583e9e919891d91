"""Which targets heads are bound to, which they refuse, and how they read an LM head that has no plain weight."""

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.inference import Target, generate
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt, target_of, tiny_target


class TestBinding:
    def test_another_target(self, target: Target) -> None:
        heads = create_heads("kangaroo", target)
        others: list[tuple[dict[str, Any], str]] = [
            ({"hidden_size": 64, "head_dim": 8}, "hidden size 32, this target .* has 64"),
            ({"vocab_size": 100}, "vocabulary size 128, this target .* has 100"),
            ({"num_hidden_layers": 7}, "number of layers 6, this target .* has 7"),
        ]
        for overrides, message in others:
            with pytest.raises(ValueError, match=message + ".*: load the target"):
                heads.bind(target_of("llama", **overrides))
            assert heads.target is target, "a refused target must not replace the one that fits"

    def test_a_target_of_several_widths(self) -> None:
        """OPT-350m embeds tokens and scores states in another width than its layers have: no feature fits."""
        model = tiny_target("opt", word_embed_proj_dim=16)
        with pytest.raises(ValueError, match=r"embeddings of width 16, layers of 32 .* states of 16"):
            create_heads("eagle3", model)

    def test_unbound(self, saved: Path) -> None:
        heads = DraftHeads.from_pretrained(saved)
        with pytest.raises(RuntimeError, match=r"not bound .* heads\.bind\(target\)"):
            heads.unroll(torch.zeros(1, 4, 96), random_prompt(4))
        with pytest.raises(RuntimeError, match="not bound"):
            heads.embed(random_prompt(4))

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda heads: pickle.loads(pickle.dumps(heads))])
    def test_copies_are_unbound(self, target: Target, duplicate: Any) -> None:
        heads = tiny_heads("eagle3", target, draft_vocab_size=40)
        copied = duplicate(heads)
        with pytest.raises(RuntimeError, match="not bound"):
            _ = copied.target
        assert heads.target is target
        input_ids, features = random_prompt(6), torch.randn(1, 6, 96)
        expected = heads.unroll(features, input_ids)[-1].hidden
        assert torch.equal(copied.bind(target).unroll(features, input_ids)[-1].hidden, expected)


class TestViews:
    """What a decoder drafts with: the heads' own weights, bound to its target."""

    def test_a_view_shares_the_weights_and_leaves_the_heads_alone(self, target: Target, saved: Path) -> None:
        heads = DraftHeads.from_pretrained(saved)
        view = heads.for_target(target)
        assert type(view) is type(heads)
        assert view.target is target
        assert not heads._bound
        assert view.config is heads.config
        assert [id(p) for p in view.state_dict(keep_vars=True).values()] == [
            id(p) for p in heads.state_dict(keep_vars=True).values()
        ]

    def test_a_dropped_target_is_freed(self, saved: Path) -> None:
        heads = DraftHeads.from_pretrained(saved)
        target = Target(tiny_target("llama"))
        freed = weakref.ref(target)
        generate(target, heads, random_prompt(5), max_new_tokens=4, do_sample=False)
        del target
        gc.collect()
        assert freed() is None


class TestDtypes:
    """Heads draft in the target's dtype, whatever their own is."""

    def test_the_copy_is_kept_until_the_weights_change(self, saved: Path) -> None:
        heads = DraftHeads.from_pretrained(saved)
        targets = [Target(tiny_target("llama", dtype=torch.bfloat16, seed=seed)) for seed in range(2)]

        def weight(target: Target) -> Tensor:
            view = heads.for_target(target)
            assert torch.equal(view.fc.weight, heads.fc.weight.to(torch.bfloat16))
            assert torch.equal(view.draft_token_ids, heads.draft_token_ids)
            return view.fc.weight

        kept = weight(targets[0])
        assert weight(targets[0]) is weight(targets[1]) is kept
        with torch.no_grad():
            heads.fc.weight.add_(1.0)
        changed = weight(targets[0])
        assert changed is not kept
        heads.train()
        heads.fc.weight.data.add_(1.0)  # as some optimizers write: torch does not count it
        weight(targets[0])
        heads.eval()
        heads.load_state_dict({name: tensor + 1 for name, tensor in heads.state_dict().items()})
        weight(targets[0])
        heads.config.norm_output = True  # settings are shared
        assert heads.for_target(targets[0]).config.norm_output


class Int8Head(nn.Module):
    """An LM head as quantisers make them: rows of 8-bit numbers, each with a scale, and a weight no one can copy."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(linear.weight.detach().abs().amax(1, keepdim=True) / 127, requires_grad=False)
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().char(), requires_grad=False)
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale, self.bias)


class TestLMHeadThatHasNoPlainWeight:
    """Kinds that start from the target's LM head read it as the head computes."""

    @pytest.mark.parametrize(
        ("head_type", "options"),
        [("medusa", {}), ("hydra", {}), ("eagle3", {}), ("eagle3", {"draft_vocab_size": 40})],
        ids=["medusa", "hydra", "eagle3", "eagle3-reduced"],
    )
    def test_quantised(self, head_type: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("draftsmith.inference.targets.parts._ROWS", 10)  # parts of unequal size
        model: Any = tiny_target("llama")
        model.lm_head = Int8Head(model.lm_head)
        wanted = model.lm_head.weight.float() * model.lm_head.scale
        heads = create_heads(head_type, model, **options)
        if options:
            heads.fit_vocabulary(torch.arange(128))
            wanted = wanted[88:]
        weights = [value for name, value in heads.state_dict().items() if "lm_head" in name]
        assert weights
        for weight in weights:
            assert torch.equal(weight, wanted)

    def test_offloaded(self, tmp_path: Path) -> None:
        accelerate = pytest.importorskip("accelerate", reason="accelerate is an optional extra")
        model: Any = tiny_target("llama")
        wanted = model.lm_head.weight.detach().clone()
        places = {"model": "cpu", "lm_head": "disk"}
        model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
        assert model.lm_head.weight.is_meta
        assert torch.equal(Target(model).lm_head_weight(), wanted)
