"""Joint training of heads and adapters of the target (Medusa-2): what is trained when, how much, and what is stored."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import draftsmith.training.run.joint as joint_module
from draftsmith.heads import DraftHeads, create_heads
from draftsmith.heads.modules.host_tensors import read_on_host
from draftsmith.inference import Target, generate
from draftsmith.training.data.collation import ConversationCollator
from draftsmith.training.features.encoding import TargetStates
from draftsmith.training.losses.draft_loss import LossOutput, draft_loss
from draftsmith.training.losses.teacher import compute_teacher
from draftsmith.training.options.training_options import JointArguments
from draftsmith.training.run.joint import JointModel, JointTrainer, add_adapter
from tests.tiny_targets import random_prompt, tiny_target
from tests.training.runner import Runner, assert_same

pytest.importorskip("peft", reason="peft is an optional extra")

# peft asks transformers by a name that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
JOINT: dict[str, Any] = {
    "head_type": "medusa",
    "head_overrides": ["num_heads=2"],
    "lora_r": 4,
    "heads_loss_weight": 0.2,
    "num_eval_prompts": 0,
    "validation_fraction": 0,
}
NO_LOSS = LossOutput(loss=torch.zeros(()))


def adapters(trainer: Any) -> list[Tensor]:
    return [weight.detach().clone() for weight in trainer.joint.adapters]


def stored_adapter(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


class TestLosses:
    """`JointModel.forward` against both losses computed from whole logits of the stock PEFT model."""

    @pytest.fixture(autouse=True)
    def _set_up(self) -> None:
        rows = [
            {"input_ids": random_prompt(length, seed=length)[0].tolist(), "loss_mask": [0] * 5 + [1] * (length - 5)}
            for length in (21, 14)
        ]
        self.batch = ConversationCollator(0)(rows)

    def make(self, head_type: str = "medusa", **options: Any) -> JointModel:
        torch.manual_seed(7)
        model: Any = add_adapter(tiny_target("llama").requires_grad_(False), JointArguments(lora_r=4, **options))
        for weight in model.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.2)
        target = Target(model)
        return JointModel(create_heads(head_type, target), target, JointArguments(lora_r=4, **options))

    def draft(self, joint: JointModel, states: TargetStates) -> LossOutput:
        ids, mask = self.batch["input_ids"], self.batch["loss_mask"].values
        teacher = compute_teacher(joint.target, states.last_hidden, ids, mask, None, loss_type="distillation")
        loss = partial(draft_loss, teacher=teacher, loss_mask=mask, loss_type="distillation", step_decay=0.8)
        return joint.heads(states.features, ids, loss_fn=loss, loss_mask=mask)

    def gradients(self, joint: JointModel, loss: Tensor) -> dict[str, Tensor]:
        joint.zero_grad()
        loss.backward()
        return {name: weight.grad.clone() for name, weight in joint.named_parameters() if weight.grad is not None}

    def plainly(self, joint: JointModel) -> tuple[Tensor, Tensor]:
        """(whole loss, the target's) by the textbook."""
        model = joint.target.model
        ids, mask, is_real = (read_on_host(self.batch[name]) for name in ("input_ids", "loss_mask", "attention_mask"))
        options = {"input_ids": ids, "attention_mask": is_real, "output_hidden_states": True}
        with torch.no_grad(), model.disable_adapter():
            before = model(**options).logits[:, :-1].log_softmax(-1)
        output = model(**options)
        after = output.logits[:, :-1].log_softmax(-1)
        count = mask[:, 1:].sum()
        if joint.args.target_loss == "lm":
            each = F.cross_entropy(after.transpose(1, 2), ids[:, 1:], reduction="none")
        else:
            each = (before.exp() * (before - after)).sum(-1)
        own = (each * mask[:, 1:]).sum() / count
        hidden = [output.hidden_states[layer] for layer in joint.heads.feature_layers]
        states = TargetStates(torch.cat(hidden, dim=-1), output.hidden_states[-1])
        return own + joint.args.loss_weight * self.draft(joint, states).loss, own

    @pytest.mark.parametrize(("target_loss", "head_type"), [("lm", "medusa"), ("self_distillation", "eagle3")])
    def test_losses_and_gradients(self, target_loss: str, head_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
        joint = self.make(head_type, target_loss=target_loss, heads_loss_weight=0.3)
        expected, own = self.plainly(joint)
        wanted = self.gradients(joint, expected)
        assert sum("adapters" in name for name in wanted) == len(joint.adapters) > 0
        for is_chunked, is_recomputed in ((False, False), (True, False), (False, True)):
            if is_chunked:
                monkeypatch.setattr(joint_module, "rows_per_chunk", lambda columns: 3)
            if is_recomputed:
                joint.activation_checkpointing_enable()
            output = joint(self.batch, partial(self.draft, joint))
            assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
            assert (output.target_sum / output.target_count).item() == pytest.approx(own.item(), rel=1e-5)
            found = self.gradients(joint, output.loss)
            assert found.keys() == wanted.keys()
            for name, gradient in wanted.items():
                assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
            monkeypatch.undo()

    @pytest.mark.parametrize("target_loss", ["lm", "self_distillation"])
    def test_packed_rows_equal_rows_of_their_own(self, target_loss: str) -> None:
        """Also where a document begins with the assistant's token, which nothing in the row predicts."""
        joint = self.make(target_loss=target_loss)
        rows = [{"input_ids": random_prompt(n, seed=n)[0].tolist(), "loss_mask": [1] * n} for n in (9, 14, 6)]
        parts = [joint(ConversationCollator(0)([row]), lambda states: NO_LOSS) for row in rows]
        wanted = self.gradients(joint, sum(part.loss * part.target_count for part in parts) / 26)
        packed = {name: [[value for row in rows for value in row[name]]] for name in rows[0]}
        batch = ConversationCollator(0)(
            [{name: values[0] for name, values in packed.items()} | {"document_lengths": [9, 14, 6]}]
        )
        output = joint(batch, lambda states: NO_LOSS)
        assert output.target_count == 26 == sum(part.target_count for part in parts)
        assert output.target_sum.item() == pytest.approx(sum(part.target_sum.item() for part in parts), rel=1e-4)
        for name, gradient in self.gradients(joint, output.loss).items():
            assert (wanted[name] - gradient).norm() <= 1e-4 * gradient.norm(), name

    def test_only_the_adapters_dropout_is_ever_on(self) -> None:
        joint = self.make(lora_dropout=0.5)
        joint.train()
        assert not joint.target.model.training
        on = [name for name, module in joint.target.model.named_modules() if module.training]
        assert on
        assert all("lora_dropout" in name for name in on)
        one, other = (joint(self.batch, partial(self.draft, joint)).loss for _ in range(2))
        assert one != other
        joint.eval()
        assert not any(module.training for module in joint.target.model.modules())
        one, other = (joint(self.batch, partial(self.draft, joint)).loss for _ in range(2))
        assert one == other


class TestRuns:
    def prepare(self, train: Runner, **options: Any) -> JointTrainer:
        trainer = train.prepare(**{**JOINT, **options}).trainer
        assert isinstance(trainer, JointTrainer)
        return trainer

    def test_both_learn_and_the_target_stays_itself(self, train: Runner) -> None:
        options = {
            "max_steps": 30,
            "learning_rate": 0.008,
            "validation_fraction": 0.25,
            "eval_strategy": "steps",
            "eval_steps": 30,
            "num_eval_prompts": 2,
        }
        metrics = train(**{**JOINT, **options})
        history = json.loads((train.output_dir / "training_record.json").read_text())["metrics"]
        assert metrics["eval_target_loss"] == pytest.approx(history["eval_target_loss"])
        alone = train(**{**JOINT, **options, "max_steps": 1, "output_dir": train.output_dir.with_name("start")})
        assert metrics["eval_loss"] < 0.9 * alone["eval_loss"]
        assert 0 < metrics["eval_target_loss"] < 0.1
        assert alone["eval_target_loss"] == 0

        heads: DraftHeads = DraftHeads.from_pretrained(train.output_dir)
        model = AutoModelForCausalLM.from_pretrained(train.defaults["target"]).eval()
        prompt = random_prompt(9, vocab_size=60)
        before = model(prompt).logits
        target = heads.apply_adapter(model)
        adapted: Any = target.model
        assert not torch.equal(adapted(prompt).logits, before)
        with adapted.disable_adapter():
            assert torch.equal(adapted(prompt).logits, before)
        mask = torch.ones_like(prompt)
        sampled = {"max_new_tokens": 12, "do_sample": True, "seed": 3}
        plain = generate(target, None, prompt, mask, **sampled)
        assert torch.equal(generate(target, heads, prompt, mask, **sampled).sequences, plain.sequences)
        greedy = generate(target, heads, prompt, mask, max_new_tokens=12, do_sample=False).sequences
        assert torch.equal(
            greedy, adapted.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=12, do_sample=False)
        )

    def test_the_best_checkpoint_is_both_parts_of_it(self, train: Runner) -> None:
        options = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_target_loss", "greater_is_better": True}
        train(**{**JOINT, **options, **best, "validation_fraction": 0.25, "save_total_limit": 5, "learning_rate": 0.01})
        history = json.loads((train.output_dir / "checkpoint-4" / "trainer_state.json").read_text())
        chosen = Path(history["best_model_checkpoint"])
        assert_same(stored_adapter(train.output_dir), stored_adapter(chosen))
        assert_same(train.weights(), load_file(chosen / "model.safetensors"))

    def test_accumulated_batches_equal_one_big_batch(self, train: Runner) -> None:
        """Both losses, also of packed rows, whose documents begin with tokens that nothing predicts."""
        found = []
        options = {"head_type": "block", "head_overrides": ["num_anchors=3"], "target_loss": "lm", "optim": "sgd"}
        for batch_size, accumulation in ((4, 1), (1, 4)):
            split = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
            trainer = self.prepare(train, **options, **split, max_steps=3, packing=True, learning_rate=0.01)
            trainer.train()
            logs = [entry for entry in trainer.state.log_history if "loss" in entry]
            found.append(([entry["loss"] for entry in logs], trainer.heads.state_dict(), adapters(trainer)))
        (losses, heads, lora), (other_losses, other_heads, other_lora) = found
        assert other_losses == pytest.approx(losses, rel=1e-4)
        assert len(losses) == 3
        torch.testing.assert_close(other_heads, heads, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(other_lora, lora, rtol=1e-3, atol=1e-6)

    @pytest.mark.ci
    @pytest.mark.slow
    def test_resuming_changes_nothing(self, train: Runner) -> None:
        """Dropout draws random numbers."""
        options = {**JOINT, "max_steps": 6, "lora_dropout": 0.1, "save_strategy": "steps", "save_steps": 2}
        train(**options)
        expected = train.weights(), stored_adapter(train.output_dir)
        resumed = train.output_dir.with_name("resumed")
        for step in (1, 5):
            train.break_off(step, **options, output_dir=resumed, resume_from_checkpoint=True)
        train(**options, output_dir=resumed, resume_from_checkpoint=True)
        assert_same(load_file(resumed / "model.safetensors"), expected[0])
        assert_same(stored_adapter(resumed), expected[1])
        (resumed / "adapter" / "adapter_model.safetensors").unlink()
        train(**options, output_dir=resumed, resume_from_checkpoint=True)  # finished: it is only written again
        assert_same(stored_adapter(resumed), expected[1])

        with pytest.raises(ValueError, match=r"\br 4 \(now 8\)"):
            train(**{**options, "lora_r": 8}, output_dir=resumed, resume_from_checkpoint=True)
        plain = dict.fromkeys(("lora_r", "lora_dropout", "heads_loss_weight"))
        with pytest.raises(ValueError, match=r"checkpoint-6 .*lora_r 4 \(now None\)"):
            train(**{**options, **plain}, output_dir=resumed, resume_from_checkpoint=True)

    def test_continuing_from_stored_heads(self, train: Runner) -> None:
        """With their adapter trained on, or as it is."""
        train(**{**JOINT, "max_steps": 4})
        first = stored_adapter(train.output_dir)
        again = {"init_heads": train.output_dir, "head_type": None, "head_overrides": None, "max_steps": 2}
        for name, options in {"frozen": dict.fromkeys(("lora_r", "heads_loss_weight")), "trained": {}}.items():
            folder = train.output_dir.with_name(name)
            train(**{**JOINT, **again, **options}, output_dir=folder)
            same = all(torch.equal(weight, first[key]) for key, weight in stored_adapter(folder).items())
            assert same == (name == "frozen")
            DraftHeads.from_pretrained(folder).apply_adapter(tiny_like(train))
        start = self.prepare(train, **again, output_dir=train.output_dir.with_name("start"))
        stored = {id_of(weight) for weight in first.values()}
        assert {id_of(weight) for weight in start.joint.adapters} == stored


def tiny_like(train: Runner) -> Any:
    return AutoModelForCausalLM.from_pretrained(train.defaults["target"]).eval()


def id_of(weight: Tensor) -> tuple[float, ...]:
    return tuple(weight.detach().flatten().tolist())


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lora_alpha": 8.0}, "lora_alpha .*lora_r"),
            ({"lora_alpha": 8.0, "target_loss": "lm"}, "lora_alpha, target_loss .*lora_r"),
            ({"lora_r": 0}, "lora_r 0"),
        ],
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            JointArguments(**options)

    def test_borrowed_layers(self) -> None:
        with pytest.raises(ValueError, match="lm_head"):
            add_adapter(tiny_target("llama"), JointArguments(lora_r=4, lora_target_modules=["lm_head", "q_proj"]))
