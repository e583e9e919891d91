"""DraftHeads: the contract every kind of trained heads keeps, and how heads are saved, loaded and bound to a target.

Legend: B batch, T sequence length, F feature width (number of tapped layers x target hidden size), D hidden size.
"""

from __future__ import annotations

import inspect
import logging
import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from heads.adapter import FOLDER, StoredAdapter, is_adapted, load_adapter, write_adapter
from heads.checkpoint import replace_checkpoint
from heads.config import DraftHeadsConfig, name_of_target
from heads.draft_step import DraftStep, join_documents
from heads.modules.layers import DraftCache
from inference.drafters.base import Drafter, DraftLogits
from inference.targets.documents import split_documents
from inference.targets.target import Target

logger = logging.getLogger(__name__)

EXTEND_CHUNK = 512  # slots of a prompt that `extend` takes in at a time


class DraftHeads(Drafter, PreTrainedModel):  # type: ignore[misc, unused-ignore]
    """A small trained module that drafts for a frozen target; base class of every kind.

    A kind sets `config_class`, builds its modules in `__init__` and implements `unroll` (training), `start`, `extend`
    and `expand` (decoding: they are drafters, see `inference.Drafter`), and `draft_caches` (for `copy_rows`).
    `default_loss` is its usual objective, in the words of the training option `loss_type`; `estimates_states` says that
    what its steps score estimates the state that the target's LM head reads, so that `smooth_l1` can compare the two.
    `runs_target_layers` says that drafted tokens pass through layers of the target (`shares_target_cache`) and have
    features as certain ones do: the one step of `unroll` then serves every depth, and reads features up to t + 1.

    `DraftHeads.from_pretrained(path_or_hub_id)` returns the right kind.
    """

    config_class = DraftHeadsConfig
    base_model_prefix = "heads"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    default_loss: str = "distillation"
    default_step_decay: ClassVar[float] = 0.8
    estimates_states: ClassVar[bool] = False
    runs_target_layers: ClassVar[bool] = False
    can_copy_rows = True

    def __init__(self, config: DraftHeadsConfig) -> None:
        super().__init__(config)
        # A list hides the target from nn.Module: borrowed modules are never saved and never trained by accident.
        self._bound: list[Target] = []
        # Where their adapter is: stored beside them, or in a PEFT model that is being trained (hidden likewise).
        self._adapter: list[StoredAdapter | nn.Module] = []
        self._has_applied_adapter = False

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the target behind: they come back unbound."""
        stored = [adapter for adapter in self._adapter if isinstance(adapter, StoredAdapter)]
        return {**self.__dict__, "_bound": [], "_adapter": stored, "_has_applied_adapter": False}

    # What the decode loop reads.

    @property
    def feature_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.config.feature_layers)

    @property
    def draft_token_ids(self) -> Tensor | None:
        """[C] int64, the target's id of each draft vocabulary entry; None = the target's own vocabulary."""
        return None

    @abstractmethod
    def start(self, batch_size: int, max_length: int, num_scratch: int) -> Any: ...

    @abstractmethod
    def extend(
        self, state: Any, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits: ...

    @abstractmethod
    def expand(self, state: Any, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits: ...

    @abstractmethod
    def draft_caches(self, state: Any) -> list[DraftCache]:
        """Those of a state, which hold all that later slots read of certain ones; kinds that keep more extend
        `copy_rows`."""

    def copy_rows(self, state: Any, source: Any, rows: Tensor, lengths: Tensor, *, max_slots: int) -> None:
        """`Drafter.copy_rows`."""
        for cache, other in zip(self.draft_caches(state), self.draft_caches(source), strict=True):
            cache.copy_rows(other, rows, lengths, max_slots)

    # Training.

    @abstractmethod
    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        """All drafting steps over whole right-padded sequences.

        Args:
            features: [B, T, F] the target's features of every position.
            input_ids: [B, T] int64.

        Returns:
            one `DraftStep` per depth (one alone if `runs_target_layers`); entries whose predicted position t + shift
            lies beyond T - 1 are meaningless.
        """

    def unroll_where(self, features: Tensor, input_ids: Tensor, loss_mask: Tensor) -> list[DraftStep]:
        """`unroll` for a loss on the tokens of `loss_mask` [B, T] alone: kinds that draw slots draw them there."""
        return self.unroll(features, input_ids)

    def forward(
        self,
        features: Tensor,
        input_ids: Tensor,
        loss_fn: Callable[[list[DraftStep]], Any] | None = None,
        loss_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        num_groups: int | None = None,
    ) -> Any:
        """Unrolls (with a `loss_mask`: `unroll_where`) and, when given, applies `loss_fn` to the steps: inside forward,
        so that the hooks of DDP, FSDP and ZeRO see every parameter that is used.

        With `document_ids` [B, T] the rows hold several documents, which are unrolled apart from one another (see
        `inference.targets.documents.split_documents`, also for `num_groups`); no kind needs to know.
        """
        if document_ids is None:
            steps = self._unroll(features, input_ids, loss_mask)
        else:
            groups = split_documents(document_ids, num_groups=num_groups)
            unrolled = [
                self._unroll(
                    group.read(features),
                    group.read(input_ids),
                    None if loss_mask is None else group.read(loss_mask) * group.mask,
                )
                for group in groups
            ]
            steps = join_documents(groups, unrolled, document_ids)
        return steps if loss_fn is None else loss_fn(steps)

    def _unroll(self, features: Tensor, input_ids: Tensor, loss_mask: Tensor | None) -> list[DraftStep]:
        if loss_mask is None:
            return self.unroll(features, input_ids)
        return self.unroll_where(features, input_ids, loss_mask)

    @property
    def num_unrolled_steps(self) -> int:
        """K, how many steps `unroll` returns. Kinds without a `max_depth` override it."""
        return 1 if self.runs_target_layers else cast(int, self.max_depth)

    @property
    def wants_token_counts(self) -> bool:
        """Whether `fit_vocabulary` must be called before training."""
        return False

    def fit_vocabulary(self, token_counts: Tensor) -> None:
        """Chooses the draft vocabulary from how often each target token is to be predicted ([V] int64). Kinds without a
        reduced vocabulary do nothing."""

    def init_from_target(self, target: Target) -> None:
        """Starts weights from the target's where the method says so. Kinds override it."""

    # Binding.

    def bind(self, target: Target | PreTrainedModel) -> Self:
        """Lends the heads the target's embedding and LM head, and moves them to the target's device.

        Raises:
            ValueError: when the target has another width, vocabulary or number of layers than the heads were made for,
                is an encoder-decoder model, or has embeddings or last states of another width than its layers; or when
                the heads are bound to another model already.
        """
        if not isinstance(target, Target):
            target = Target(target)
        if target.is_encoder_decoder:
            raise ValueError(
                f"{type(target.model).__name__} is an encoder-decoder model, and trained heads draft for decoder-only "
                "targets: draft with a SmallModelDrafter or an NgramDrafter"
            )
        self._check_sizes(target)
        if self._bound and self._bound[0].model is not target.model:
            raise ValueError(
                "these heads are bound to another model, whose decoders they would change: load them again for this one"
            )
        if self.config.target_adapter and not (self._has_applied_adapter or self._bound or is_adapted(target.model)):
            logger.warning(
                "these heads were trained for their target with an adapter, which this target does not have: texts are "
                "its own, but few drafts will be accepted. Decode with heads.apply_adapter(model)"
            )
        bound = self._bound[0] if self._bound else None
        if bound is None or (bound.dtype, bound.device) != (target.dtype, target.device):  # another thread may use it
            self._bound[:] = [target]
        return cast(Self, cast(nn.Module, self).to(target.device))

    def for_target(self, target: Target) -> Self:
        return self.bind(target)

    def _check_sizes(self, target: Target) -> None:
        embedding_size = target.embed_tokens(torch.zeros(1, dtype=torch.long, device=target.device)).shape[-1]
        if {embedding_size, target.state_size} != {target.hidden_size}:
            raise ValueError(
                f"{type(target.model).__name__} has embeddings of width {embedding_size}, layers of "
                f"{target.hidden_size} and last states of {target.state_size} (OPT's word_embed_proj_dim), and trained "
                "heads need one width: draft with a SmallModelDrafter or an NgramDrafter, or use another target"
            )
        for what, mine, theirs in (
            ("hidden size", self.config.target_hidden_size, target.hidden_size),
            ("vocabulary size", self.config.target_vocab_size, target.vocab_size),
            ("number of layers", self.config.target_num_layers, target.num_layers),
        ):
            if mine != theirs:
                raise ValueError(
                    f"these {self.config.head_type} heads were made for a target with {what} {mine}, this target "
                    f"({name_of_target(target) or type(target.model).__name__}) has {theirs}: load the target the "
                    f"heads were trained for ({self.config.target_name_or_path or 'not recorded'}), or train new heads"
                )

    def apply_adapter(self, target: Target | PreTrainedModel, *, merge: bool = False) -> Target:
        """The target with the adapter that these heads were trained with (Medusa-2), bound to the heads.

            heads = DraftHeads.from_pretrained(path)
            target = heads.apply_adapter(model)
            generate(target, heads, input_ids)

        Texts are then those of the adapted target, token by token. The model itself is changed: PEFT puts layers into
        it, and `target.model` is the PEFT model around it.

        Args:
            target: as it was loaded, without adapters.
            merge: add the adapter to the model's weights instead: as fast as without, and rounded to their dtype.
                `target.model` is then the model itself.

        Raises:
            ValueError: heads without an adapter (bind them to the target itself), heads that are bound to another
                model, a target that the heads or the adapter do not fit, or peft is missing.
        """
        folder = self.find_adapter()
        target = target if isinstance(target, Target) else Target(target)
        if self._bound and self._bound[0].model is not target.model:
            raise ValueError("these heads are bound to another model: load them again for this one")
        self._check_sizes(target)
        adapted = Target(load_adapter(target.model, folder, merge=merge))
        self._bound.clear()
        self._has_applied_adapter = True
        self.bind(adapted)
        return adapted

    def find_adapter(self) -> Path:
        """The local folder of the adapter beside loaded heads; from the hub it is downloaded.

        Raises:
            ValueError: there is none.
        """
        if not self._adapter or not isinstance(stored := self._adapter[0], StoredAdapter):
            raise ValueError(
                "these heads come with no stored adapter: bind them to their target as it is"
                if not self.config.target_adapter
                else "the adapter of these heads is not stored yet: save the heads, and load them again"
            )
        return stored.find()

    def belong_to_adapter(self, model: nn.Module) -> None:
        """The adapter of `model`, a PEFT model, is trained along with these heads: it is saved beside them."""
        self.config.target_adapter = FOLDER
        self._adapter[:] = [model]

    @property
    def target(self) -> Target:
        if not self._bound:
            raise RuntimeError("these heads are not bound to a target: call heads.bind(target) first")
        return self._bound[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's (frozen) input embeddings of `token_ids`, in the heads' dtype: [..., D]."""
        with torch.no_grad():
            return cast(Tensor, self.target.embed_tokens(token_ids)).to(self.dtype)

    def score_as_target(self, hidden: Tensor) -> Tensor:
        """The target's own (frozen) logits [..., V] of states [..., D] of its final norm's scale, in the target's
        dtype."""
        return self.target.compute_logits(hidden.to(self.target.dtype))

    def get_input_embeddings(self) -> Any:
        """None: embeddings are the target's. FSDP asks."""

    def get_output_embeddings(self) -> Any:
        """None, also where there is an LM head: it belongs to the unit that FSDP makes of all weights."""

    # Saving and loading.

    def _init_weights(self, module: nn.Module) -> None:
        """Modules initialise themselves in their constructors; transformers would overwrite special initial values."""

    def save_pretrained(  # type: ignore[override, unused-ignore]
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """`PreTrainedModel.save_pretrained`, but never half-written: a full disk or a kill leaves the previous
        checkpoint loadable (see `replace_checkpoint`).

        Args:
            is_main_process: False on the processes that must not write; they do nothing.
            push_to_hub: upload as well, with the keywords of `push_to_hub`; `repo_id` defaults to the directory's name.
            **kwargs: those of transformers, such as `state_dict` and `max_shard_size`.
        """
        if not is_main_process:
            return
        directory = Path(save_directory)
        hub_keys = inspect.signature(super().push_to_hub).parameters.keys() - {"max_shard_size"}
        hub = {key: kwargs.pop(key) for key in hub_keys & kwargs.keys()}
        with replace_checkpoint(directory) as scratch:
            super().save_pretrained(scratch, **kwargs)
            if self.config.target_adapter:
                if not self._adapter:
                    raise ValueError(
                        "these heads are a copy that has lost the adapter they belong to, and cannot be saved without "
                        "it: save those they were copied from"
                    )
                write_adapter(self._adapter[0], scratch / self.config.target_adapter)
        if push_to_hub:
            self.push_to_hub(**{"repo_id": directory.resolve().name, **hub})

    @classmethod
    def from_pretrained(  # type: ignore[override, unused-ignore]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        """Loads heads of any kind from a directory or a hub id.

        Raises:
            ValueError: no heads there, an unknown kind, or missing, unexpected, mis-shaped, truncated or non-finite
                tensors, each named.
        """
        from heads import HEAD_TYPES

        path = str(pretrained_model_name_or_path)
        if os.path.isdir(path) and not (Path(path) / kwargs.get("subfolder", "") / "config.json").is_file():
            raise ValueError(f"{path} has no config.json: give a directory written by DraftHeads.save_pretrained")
        hub_keys = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        hub = {key: kwargs[key] for key in hub_keys if key in kwargs}
        config_dict, _ = PreTrainedConfig.get_config_dict(path, **hub)
        kind = config_dict.get("head_type")
        if kind not in HEAD_TYPES:
            raise ValueError(
                f"{path}: config.json has head_type {kind!r}; this release knows {', '.join(sorted(HEAD_TYPES))}. "
                "Is this a directory written by DraftHeads.save_pretrained?"
            )
        kind_class = HEAD_TYPES[kind]
        if not issubclass(kind_class, cls):
            raise ValueError(f"{path} holds {kind} heads, not {cls.__name__}: load it with DraftHeads.from_pretrained")
        wants_info = kwargs.pop("output_loading_info", False)
        heads, info = kind_class._load(path, *args, **kwargs)
        if heads.config.target_adapter:
            heads._adapter[:] = [StoredAdapter(path, heads.config.target_adapter, hub)]
        return (heads, info) if wants_info else heads

    @classmethod
    def _load(cls, path: str, *args: Any, **kwargs: Any) -> tuple[Self, dict[str, Any]]:
        from safetensors import SafetensorError

        kwargs["ignore_mismatched_sizes"] = True  # as an error of transformers it would name no tensor
        try:
            loaded: Any = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise ValueError(
                f"{path}: the weights file is damaged or truncated ({error}); copy or train it again"
            ) from error
        heads, info = loaded
        problems = {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
            "of another shape": [
                f"{name} is {list(stored)} and should be {list(wanted)}"
                for name, stored, wanted in sorted(info["mismatched_keys"])
            ],
        }
        if any(problems.values()):
            found = "; ".join(f"{problem}: {', '.join(names)}" for problem, names in problems.items() if names)
            raise ValueError(f"{path}: the tensors do not fit config.json ({found})")
        for name, tensor in heads.state_dict().items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(f"{path}: tensor {name} holds NaN or infinite values; the checkpoint is not usable")
        return heads.eval(), info
