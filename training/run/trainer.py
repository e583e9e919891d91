"""`HeadsTrainer`: transformers' `Trainer` for draft heads on features of a frozen target."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput

from draftsmith.heads import DraftHeads
from draftsmith.heads.modules.draft_step import check_counted, count_predicted
from draftsmith.heads.modules.host_tensors import OnHost, read_on_host, send
from draftsmith.inference.noise import derive_seeds
from draftsmith.inference.targets.target import Target
from draftsmith.training.data.collation import find_documents
from draftsmith.training.data.streaming import ConversationStream
from draftsmith.training.distributed.launch import autocast, autocast_in_deepspeed, shard_with_fsdp
from draftsmith.training.distributed.whole_heads import gather_state, is_split
from draftsmith.training.features.encoding import TargetStates
from draftsmith.training.features.sharded_target import is_sharded
from draftsmith.training.features.sources import (
    FeatureSource,
    MissingStatesError,
    OnlineFeatures,
    ReadFeatures,
    look_ahead,
)
from draftsmith.training.losses.depth_weights import fixed_weights
from draftsmith.training.losses.draft_loss import LossOutput, check_loss, draft_loss
from draftsmith.training.losses.teacher import compute_teacher
from draftsmith.training.run.checkpoints import ExactEpochs, remove_old, write_run_file, write_whole
from draftsmith.training.run.evaluation import AcceptanceMeter
from draftsmith.training.run.optimizer import MuonWithAdamW
from draftsmith.training.run.progress import ProgressLines, SaveOnInterrupt
from draftsmith.training.run.stopping import FiniteWatch, TrainingStoppedError

# Groups of a packed batch's documents where processes share weights: about as many as elsewhere.
GROUPS_WHEN_SHARDED = 4


class HeadsTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """Trains heads; the target only computes features, without gradients.

    Args:
        target: the frozen target that the heads are bound to.
        features: reads the target's states; None = the target runs on every batch.
        measure_acceptance: called at every evaluation; None = the acceptance length is not measured.
        run_description: from `draftsmith.training.run.resume.describe_run`; stored with every checkpoint.
        **kwargs: arguments of `transformers.Trainer`; `args` are `HeadsTrainingArguments`.
    """

    logged_metrics: ClassVar[tuple[str, ...]] = ("top1",)  # prefixes of metrics in training logs

    def __init__(
        self,
        *,
        target: Target,
        features: ReadFeatures | None = None,
        measure_acceptance: AcceptanceMeter | None = None,
        run_description: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.run_description = run_description or {}
        self.target = target
        self._is_target_split = is_sharded(target.model)
        self.features = features
        options: Any = self.args
        self.loss_type: str = options.loss_type or self.heads.default_loss
        self.muon_learning_rate: float | None = options.muon_learning_rate
        self.step_decay: float = options.step_decay or self.heads.default_step_decay
        is_decay_given = options.step_decay is not None
        self.depth_weights: str | None = options.depth_weights or (
            None if is_decay_given else self.heads.default_depth_weights
        )
        check_loss(self.loss_type, self.heads)
        self.measure_acceptance = measure_acceptance
        # Tells Trainer that `compute_loss` has already divided by the count of `get_batch_samples`.
        self.model_accepts_loss_kwargs = True
        self.accelerator.gradient_accumulation_steps = 1  # in older releases accelerate divides once more
        self._num_new_tokens = 0  # of this process, not yet in the state
        self._sums: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}  # by "is training"
        self.start = time.perf_counter()  # of training; a resumed run counts the seconds before
        self.watch = FiniteWatch()
        self._ahead: tuple[Iterator[Any], Iterator[Any]] | None = None  # of the epoch: its batches, and the same ahead
        self._checkpoint_parent: Path | None = None  # set while a checkpoint is written aside
        for printer in (PrinterCallback, ProgressCallback):  # transformers' own, which print the logs as mappings
            self.remove_callback(printer)
        self._interrupts = SaveOnInterrupt()
        for callback in (ExactEpochs(), ProgressLines(), self._interrupts):
            self.add_callback(callback)

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = False
        if self.args.ddp_broadcast_buffers is None:
            self.args.ddp_broadcast_buffers = False  # they never change
        super().create_accelerator_and_postprocess()
        self.is_fsdp_enabled = shard_with_fsdp(self.accelerator)
        if self.is_deepspeed_enabled:
            autocast_in_deepspeed(self.accelerator)

    @property
    def heads(self) -> DraftHeads:
        return cast(DraftHeads, self.model)

    @property
    def heads_learning_rate(self) -> float:
        return self.args.learning_rate

    def make_more_groups(self) -> list[dict[str, Any]]:
        """Parameter groups for AdamW besides the heads'."""
        return []

    @property
    def num_groups(self) -> int | None:
        """Groups in which a packed batch's documents run; None = as many as fit the batch.

        Where processes share weights, every pass waits for all processes, so the number must be fixed.
        """
        are_heads_split = self.is_fsdp_enabled or getattr(self.args.deepspeed_plugin, "zero_stage", 0) == 3
        return GROUPS_WHEN_SHARDED if are_heads_split or self._is_target_split else None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.muon_learning_rate is None:
            return super().create_optimizer(model)
        if self.optimizer is None:
            self.optimizer = MuonWithAdamW(
                cast(nn.Module, self.model if model is None else model).named_parameters(),
                muon_learning_rate=self.muon_learning_rate,
                learning_rate=self.heads_learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                weight_decay=self.args.weight_decay,
                more_groups=self.make_more_groups(),
            )
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._interrupts.watch():
                return super().train(*args, **kwargs)
        finally:
            if self.features is not None:
                self.features.forget()

    def get_train_dataloader(self) -> DataLoader[Any]:
        if not isinstance(self.train_dataset, ConversationStream):
            return super().get_train_dataloader()
        # Not through accelerate, which would split the stream again: each process already reads its own part.
        return DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The batches of one optimizer step, and how many tokens each step of the draft predicts (`count_predicted`) in
        all of them and all processes together.

        Random choices are functions of the run's seed, the step's number and the conversation.
        """
        if self.features is not None:
            if self._ahead is None or self._ahead[0] is not epoch_iterator:
                self._ahead = (epoch_iterator, look_ahead(epoch_iterator, self.features))
            epoch_iterator = self._ahead[1]
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        for batch in batches:
            keys = read_on_host(batch["token_keys"])
            batch["token_seeds"] = OnHost(derive_seeds(keys, self.args.seed, self.state.global_step))
        counts = torch.stack([self.count_predicted(batch) for batch in batches]).sum(0)
        return batches, cast(Tensor, self.accelerator.reduce(send(counts, device), reduction="sum"))

    def count_predicted(self, batch: dict[str, Any]) -> Tensor:
        """[K] int64 on the host: how many tokens of a training batch each step of the draft predicts."""
        mask, seeds = (read_on_host(batch[name]) for name in ("loss_mask", "token_seeds"))
        documents = read_on_host(batch["document_ids"]) if "document_ids" in batch else None
        return count_predicted(self.heads.choose_slots, mask, seeds, documents, num_groups=self.num_groups)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The batch's mean loss; in training, its part of the mean over the whole optimizer step.

        Each depth's sum of losses is divided by the number of tokens that this depth predicts in all accumulated
        batches of all processes (`num_items_in_batch`, from `get_batch_samples`). So the losses and the gradients of
        accumulated and distributed batches add up to those of one big batch, for any lengths.
        """
        output = self.draft_batch(model, inputs, num_items_in_batch)
        self._add_metrics(output, is_training=model.training)
        loss = output.loss
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # DDP averages gradients
        return (loss, {}) if return_outputs else loss

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Counts on the host: Trainer's own count is a collective and a host read for every batch."""
        if self.args.include_num_input_tokens_seen != "no":
            is_all = self.args.include_num_input_tokens_seen == "all"
            mask = read_on_host(inputs["attention_mask"])
            self._num_new_tokens += mask.numel() if is_all else int(mask.sum())

    def _read_num_input_tokens(self) -> None:
        count = torch.tensor(self._num_new_tokens, device=self.args.device)
        self.state.num_input_tokens_seen += int(cast(Tensor, self.accelerator.reduce(count, "sum")))
        self._num_new_tokens = 0

    def draft_batch(self, model: Any, inputs: dict[str, Any], counts: Tensor | None) -> LossOutput:
        """The heads' loss on one batch; `model` is the heads as Trainer wrapped them. counts: as in `draft_loss`."""
        heads: DraftHeads = self.accelerator.unwrap_model(model)
        source: FeatureSource = self.features or OnlineFeatures(
            self.target, heads.feature_layers, num_groups=self.num_groups
        )
        try:
            states = source(inputs)
        except MissingStatesError as error:  # a text that is not stored, a server that is gone or gives other states
            raise TrainingStoppedError(self, str(error)) from error
        return self.draft_from(states, inputs, heads, model, counts)

    def draft_from(
        self,
        states: TargetStates,
        inputs: dict[str, Any],
        heads: DraftHeads,
        forward: Callable[..., Any],
        counts: Tensor | None,
    ) -> LossOutput:
        """The heads' loss on the target's states of a batch; `forward` runs the heads."""
        loss_mask = OnHost(read_on_host(inputs["loss_mask"]))
        teacher = compute_teacher(
            self.target,
            states.last_hidden,
            inputs["input_ids"],
            loss_mask,
            heads.draft_token_ids,
            loss_type=self.loss_type,
        )
        loss_fn = partial(
            draft_loss,
            teacher=teacher,
            loss_mask=loss_mask,
            loss_type=self.loss_type,
            step_decay=self.step_decay,
            depth_weights=self.depth_weights,
            counts=counts,
            keeps_graph=self.num_groups is not None,
        )
        # A dict, because FSDP and ZeRO-3 look for tensors in dicts. Autocast, because FSDP has none of its own.
        with autocast(self.accelerator, self.args):
            output = LossOutput(
                **forward(
                    states.features,
                    inputs["input_ids"],
                    loss_fn=lambda steps: vars(loss_fn(check_counted(steps, counts))),
                    loss_mask=loss_mask,
                    document_ids=find_documents(inputs, num_groups=self.num_groups),
                    num_groups=self.num_groups,
                    token_seeds=inputs.get("token_seeds"),
                )
            )
        if heads.training:
            self.watch.see(states, read_on_host(inputs["attention_mask"]), output)
        return output

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As Trainer's, before every optimizer step; a loss or gradient that is not finite ends the run."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.watch.check(None if self.args.fp16 else grad_norm, self)
        return grad_norm

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Computes the loss and our own metrics; nothing of size [B, T, V] is gathered."""
        inputs = self._prepare_inputs(inputs)
        dataloader = self.accelerator.gradient_state
        if dataloader.end_of_dataloader and dataloader.remainder > 0:
            # accelerate fills the last batches with rows of the first, so that all processes get equally many.
            mask = read_on_host(inputs["loss_mask"])
            is_own_B = torch.arange(len(mask)) + self.args.process_index * len(mask) < dataloader.remainder
            inputs["loss_mask"] = OnHost(mask * is_own_B[:, None])
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Adds our metrics before the logs, early stopping and the choice of the best checkpoint read them.

        They are the accuracies by depth, the acceptance length measured by decoding, and the loss as one weighted mean
        over all drafted tokens (Trainer's own loss is the mean of batch means, each a sum over the depths).
        """
        kwargs["metric_key_prefix"] = metric_key_prefix
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # the weights do not depend on the number of evaluations
            output = super().evaluation_loop(*args, **kwargs)
            metrics = self._take_metrics(is_training=False)
            if self.measure_acceptance is not None:
                measured = [self.measure_acceptance()]
                broadcast_object_list(measured)  # processes may differ in a near-tie, and all must decide alike
                metrics.update(measured[0])
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        # train_loss is Trainer's mean over the run, which is wrong after a resume.
        logs = {name: value for name, value in logs.items() if name != "train_loss"}
        self._read_num_input_tokens()
        if "loss" in logs:
            metrics = self._take_metrics(is_training=True)
            logs = {**logs, **{k: v for k, v in metrics.items() if k.startswith(self.logged_metrics) or k == "loss"}}
        super().log({k: round(v, 4) if "top" in k else v for k, v in logs.items()}, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers', but whole weights under every setting of FSDP and ZeRO-3."""
        heads = self.accelerator.unwrap_model(self.model)
        if is_split(heads):
            self._save(output_dir, state_dict=gather_state(heads))
        else:
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As transformers', but the checkpoint gets its name when it is complete
        (`draftsmith.training.run.checkpoints`).
        """
        folder = Path(super()._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        callbacks: Any = self.state.stateful_callbacks
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExportableState):  # may be new since the checkpoint that was resumed
                callbacks.setdefault(type(callback).__name__, {})
        self._read_num_input_tokens()
        with write_whole(self, folder) as written:
            self._checkpoint_parent = written.parent
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._checkpoint_parent = None
            if self.state.best_global_step == self.state.global_step:
                self.state.best_model_checkpoint = str(folder)
            if self.args.should_save:
                self.state.save_to_json(str(written / "trainer_state.json"))
                write_run_file(written, self.run_description, time.perf_counter() - self.start)
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(folder))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            remove_old(folder.parent, save_total_limit=self.args.save_total_limit, best=best)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._checkpoint_parent or super()._get_output_dir(trial))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `draftsmith.training.run.outcome` writes a card that knows of heads."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Does nothing while the checkpoint is written: `_save_checkpoint` uploads it under its own name."""

    def _load_callback_state(self) -> None:
        """As Trainer's, which restores the count of early stopping, but with the patience of the options."""
        super()._load_callback_state()
        patience = getattr(self.args, "early_stopping_patience", None)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback) and patience is not None:
                callback.early_stopping_patience = patience

    def _add_metrics(self, output: LossOutput, *, is_training: bool) -> None:
        sums = self._sums[is_training]
        for name in ("loss_sums", "top1", "top5", "positions"):
            values = torch.stack(getattr(output, name)).detach()
            sums[name] = sums[name] + values if name in sums else values

    def _take_metrics(self, *, is_training: bool) -> dict[str, float]:
        """Means since the last call, over all processes; depth 1 = the first drafted token."""
        sums = self._sums[is_training]
        if not sums:
            return {}
        wide = torch.float32 if self.args.device.type == "mps" else torch.float64
        total = {name: self.accelerator.reduce(value.to(wide), "sum").tolist() for name, value in sums.items()}
        sums.clear()
        num_steps = len(total["positions"])
        weights = fixed_weights(num_steps, step_decay=self.step_decay, depth_weights=self.depth_weights)
        metrics = {"loss": 0.0}
        for k, positions in enumerate(total["positions"]):
            metrics["loss"] += weights[k] / sum(weights) * total["loss_sums"][k] / max(positions, 1)
            metrics[f"top1_depth{k + 1}"] = total["top1"][k] / max(positions, 1)
            metrics[f"top5_depth{k + 1}"] = total["top5"][k] / max(positions, 1)
        return metrics
