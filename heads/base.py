"""DraftHeads: the interface of every kind of trained heads. Heads are bound to a target, saved and loaded here.

Legend: B batch, T sequence length, F feature width (number of tapped layers x target hidden size), D hidden size,
V target vocabulary, C draft vocabulary.
"""

import copy
import inspect
import logging
import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.heads.adapter import FOLDER, StoredAdapter, is_adapted, load_adapter, write_adapter
from draftsmith.heads.binding import WeightCopies, WeightCopy, check_fit
from draftsmith.heads.checkpoint import load_strictly, read_head_type, refuse_published, replace_checkpoint
from draftsmith.heads.config import DraftHeadsConfig
from draftsmith.heads.draft_vocabulary import COUNTS, DraftVocabulary, read_counts, take_lm_head_rows, write_counts
from draftsmith.heads.formats.published import HUB_KEYS
from draftsmith.heads.importing import check_kind, import_heads
from draftsmith.heads.modules.draft_step import DraftStep, unroll_documents
from draftsmith.heads.modules.host_tensors import OnHost, read_on_host
from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.openmp import release_workers
from draftsmith.inference.targets.model_config import WITH_AUTOCAST
from draftsmith.inference.targets.target import Target

logger = logging.getLogger(__name__)


class DraftHeads(DraftVocabulary, Drafter, PreTrainedModel):  # type: ignore[misc, unused-ignore]
    """A small trained module that drafts for a frozen target; the base class of every kind.

    `DraftHeads.from_pretrained(path_or_hub_id)` returns the right kind.

    A kind sets `config_class`, builds its modules in `__init__` and implements `unroll` (training), and `start`,
    `extend` and `expand` (decoding, see `draftsmith.Drafter`).

    Attributes:
        default_loss: the kind's usual objective, in the words of the training option `loss_type`.
        default_step_decay: the usual weight of one step's loss relative to the step before.
        default_depth_weights: the usual training option `depth_weights`, where no `step_decay` is given.
        default_learning_rate: the usual peak learning rate of AdamW.
        estimates_states: whether the steps' states estimate the state that the target's LM head reads, so that
            `smooth_l1` can compare the two.
        borrows_lm_head: whether the target's LM head scores drafts. False: the heads have LM heads, modules of the name
            `lm_head`. None: neither, so `limit_vocabulary` is refused.
        runs_target_layers: whether drafted tokens pass through layers of the target and so have features. Then one step
            of `unroll` serves every depth, and it reads features up to t + 1.
        grows_from: the kind of heads that the classmethod `grow_from` turns into heads of this kind, with the same
            drafts; None = the kind has no such method.
    """

    config_class = DraftHeadsConfig
    base_model_prefix = "heads"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    default_loss: str = "distillation"
    default_step_decay: ClassVar[float] = 0.8
    default_depth_weights: ClassVar[str | None] = None
    default_learning_rate: ClassVar[float] = 1e-4  # decoder layers on a large target (EAGLE-3's code: 5e-5)
    estimates_states: ClassVar[bool] = False
    borrows_lm_head: bool | None = None
    runs_target_layers: ClassVar[bool] = False
    grows_from: ClassVar[str | None] = None
    can_copy_rows = True

    def __init__(self, config: DraftHeadsConfig) -> None:
        super().__init__(config)
        # A list hides the target from nn.Module: borrowed modules are never saved and never trained by accident.
        self._bound: list[Target] = []
        # The target's adapter, in a list for the same reason: stored beside the heads, or in a PEFT model in training.
        self._adapter: list[StoredAdapter | nn.Module] = []
        self._checked: weakref.WeakSet[Target] = weakref.WeakSet()
        self._copies = WeightCopies()
        self._copy: WeightCopy | None = None  # a view's
        self._init_vocabulary()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are unbound."""
        stored = [adapter for adapter in self._adapter if isinstance(adapter, StoredAdapter)]
        fresh = {"_bound": [], "_adapter": stored, "_checked": None, "_copies": None, "_copy": None, "_learned": []}
        return {**self.__dict__, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_checked": weakref.WeakSet(), "_copies": WeightCopies()})

    # What the decode loop reads.

    @property
    def feature_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.config.feature_layers)

    @abstractmethod
    def start(self, batch_size: int, max_length: int, num_scratch: int) -> Any: ...

    @abstractmethod
    def extend(
        self, state: Any, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits: ...

    @abstractmethod
    def expand(self, state: Any, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits: ...

    # Training.

    @abstractmethod
    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        """Drafts at all slots of whole, right-padded sequences.

        Args:
            features: [B, T, F] the target's features of every position.
            input_ids: [B, T] int64.

        Returns:
            one `DraftStep` per depth (a single one if `runs_target_layers`); step k has shift 2 + k. Entries whose
            predicted position t + shift lies beyond T - 1 are meaningless.
        """

    def unroll_where(
        self, features: Tensor, input_ids: Tensor, loss_mask: Tensor, token_seeds: Tensor | None = None
    ) -> list[DraftStep]:
        """`unroll` for a loss on only the tokens of `loss_mask` [B, T], a tensor on the host. Kinds that draw slots
        draw them among these. Random choices are a function of `token_seeds`, [B, T] int64 on the host; None = no
        choice is random."""
        return self.unroll(features, input_ids)

    def choose_slots(self, loss_mask: Tensor, token_seeds: Tensor | None = None) -> list[Tensor | None]:
        """The `DraftStep.slots` of each step of `unroll_where`, known before it runs."""
        return [None] * self.num_unrolled_steps

    def forward(
        self,
        features: Tensor,
        input_ids: Tensor,
        loss_fn: Callable[[list[DraftStep]], Any] | None = None,
        loss_mask: Tensor | OnHost | None = None,
        document_ids: Tensor | OnHost | None = None,
        num_groups: int | None = None,
        token_seeds: Tensor | OnHost | None = None,
    ) -> Any:
        """Unrolls, and applies `loss_fn` to the steps when it is given.

        The loss is computed inside forward so that the hooks of DDP, FSDP and ZeRO see every parameter that is used.

        Args:
            features, input_ids: as in `unroll`.
            loss_fn: a function of the steps, whose result is returned; None returns the steps.
            loss_mask: as in `unroll_where`; None = all tokens have a loss.
            document_ids: [B, T], for rows that hold several documents. Each document is unrolled by itself (see
                `split_documents`), so `unroll` sees single documents only.
            num_groups: as in `split_documents`.
            token_seeds: as in `unroll_where`; None = in training mode with a `loss_mask` drawn from
                torch's global generator.

        `loss_mask`, `document_ids` and `token_seeds` are read on the host, which waits for those on a device.
        """
        mask, seeds = (None if x is None else read_on_host(x) for x in (loss_mask, token_seeds))
        if seeds is None and mask is not None and self.training:
            seeds = torch.randint(-(2**63), 2**63 - 1, mask.shape)
        if mask is None:
            mask = torch.ones(input_ids.shape, dtype=torch.long)
        unroll = self.unroll_where
        if document_ids is not None:
            unroll = partial(unroll_documents, unroll, read_on_host(document_ids), num_groups)
        steps = unroll(features, input_ids, mask, seeds)
        return steps if loss_fn is None else loss_fn(steps)

    def train(self, mode: bool = True) -> Self:
        if mode:
            self._copies.forget()
        return cast(Self, super().train(mode))

    @property
    def num_unrolled_steps(self) -> int:
        """The number of steps that `unroll` returns. Kinds without a `max_depth` override it."""
        if self.max_depth is None and not self.runs_target_layers:
            raise TypeError(f"{type(self).__name__} has no max_depth: give it the property num_unrolled_steps")
        return 1 if self.runs_target_layers else cast(int, self.max_depth)

    @property
    def wants_token_counts(self) -> bool:
        """Whether `fit_vocabulary` must be called before training."""
        return False

    def fit_vocabulary(self, token_counts: Tensor) -> None:
        """Notes which tokens the training data has, for `limit_vocabulary`. Kinds with a reduced vocabulary of their
        own choose it: the most frequent tokens.

        Args:
            token_counts: [V] int64, how often the data has each target token as a token to predict.
        """
        self.token_counts = token_counts

    def init_from_target(self, target: Target) -> None:
        """Copies initial weights from the target; called without gradients. The base class copies nothing."""

    # Binding.

    def bind(self, target: Target | PreTrainedModel) -> Self:
        """Binds these heads in place: they borrow the target's embedding and LM head, and move to its device.

        Training needs a bound target. A decoder makes its own bound view (`for_target`). Binding again replaces the
        target.

        Raises:
            ValueError: the heads do not fit the target.
        """
        target = Target.of(target)
        self._check(target)
        self._bound[:], self._learned[:] = [target], []
        return cast(Self, cast(nn.Module, self).to(target.device))

    def for_target(self, target: Target) -> Self:
        """A view of these heads that is bound to the target; the heads stay as they are.

        For a target of the heads' own dtype and device, the view shares the weights. For another target the weights are
        copied into its dtype. The copy is kept until the weights change; the next `for_target` then copies again. For a
        target with packed weights they are packed.

        Raises:
            ValueError: the heads do not fit the target.
        """
        self._check(target)
        view = copy.copy(self)
        view._bound, view._adapter, view._copies = [target], self._adapter, self._copies
        columns = view._find_columns(target)
        if (self.dtype, self.device) != (target.dtype, target.device) or columns is not None:
            view._copy = self._copies.make(self, target.dtype, target.device, columns)
            vars(view).update(view._copy.parts)
        if columns is not None:
            view._columns, view._column_ids = None, self._ids_of(columns).to(target.device, copy=True)
        if self.borrows_lm_head and (columns is not None or self.borrowed_rows is not None):
            rows = take_lm_head_rows(target, cast(Tensor, view._column_ids).to(target.device))
            view._modules = {**view._modules, "borrowed_rows": rows}
        view = self._copies.pack(view) if target.is_packed else view
        if view._column_ids is not None:
            self._copies.views.add(view)
        return view

    @torch.no_grad()
    def write_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces all weights in place, also in the views that decoders have made. Call it between two steps.

        Args:
            weights: by name, those of heads with the same config. With `token_counts` (`copy_weights`), the tokens to
                draft are chosen again; their number stays.

        Raises:
            ValueError: names or shapes differ from the heads' own.
        """
        given = {name: tensor for name, tensor in weights.items() if name != COUNTS}
        own: dict[str, Tensor] = dict(self.named_parameters())
        own |= {name: buffer for name, buffer in self.named_buffers() if name in given}
        if {name: x.shape for name, x in given.items()} != {name: x.shape for name, x in own.items()}:
            raise ValueError(
                f"got weights of other {self.config.head_type} heads, with other names or shapes: give those of heads "
                "with the same config"
            )
        for name, tensor in own.items():
            tensor.copy_(given[name])
        counts, old, choose = weights.get(COUNTS), self.token_counts, None
        if counts is not None and (old is None or not torch.equal(counts, old)):
            DraftVocabulary.choose_vocabulary(self, counts)  # the rows of an own LM head are among the weights
            choose = self._choose
            for view in self._copies.views:
                cast(DraftHeads, view)._take_columns(self)
        self._copies.update(choose)

    def copy_weights(self) -> dict[str, Tensor]:
        """All that learning may change, for `write_weights`: the weights, which tokens an own LM head scores, and the
        counts that choose the tokens of a draft vocabulary."""
        found: dict[str, Tensor] = dict(self.named_parameters())
        if self.own_token_ids is not None:
            found |= {name: getattr(self, name) for name in self.vocabulary_buffers}
        if self.token_counts is not None:
            found[COUNTS] = self.token_counts
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def _check(self, target: Target) -> None:
        """Refuses a target that the heads do not fit, once for each."""
        if target not in self._checked:
            self.check_target(target)
            self._checked.add(target)

    def check_target(self, target: Target) -> None:
        """Refuses a target that the heads cannot draft for. Kinds that need more of a target extend this.

        Raises:
            ValueError: see `draftsmith.heads.binding.check_fit`.
        """
        check_fit(cast(DraftHeadsConfig, self.config), target)
        if self.config.target_adapter and not is_adapted(target.model):
            logger.warning(
                "these heads were trained with an adapter of their target, and this target has no adapter. The text is "
                "right, but few drafts will be accepted: decode with heads.apply_adapter(model)"
            )

    @property
    def target(self) -> Target:
        if not self._bound:
            raise RuntimeError("these heads are not bound to a target: call heads.bind(target) first")
        return self._bound[0]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The heads' dtype, or autocast's where it is on: states do not stay wider than what layers compute with."""
        is_on = self.device.type in WITH_AUTOCAST and torch.is_autocast_enabled(self.device.type)
        return torch.get_autocast_dtype(self.device.type) if is_on else self.dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's (frozen) input embeddings of `token_ids` [...], in `compute_dtype`: [..., D]."""
        with torch.no_grad():
            return cast(Tensor, self.target.embed_tokens(token_ids)).to(self.compute_dtype)

    def get_input_embeddings(self) -> Any:
        """None, which FSDP reads: the embeddings are the target's."""

    def enable_input_require_grads(self) -> None:
        """Does nothing. transformers calls it for activation checkpointing of models whose first weights are frozen."""

    def get_output_embeddings(self) -> Any:
        """None, also for kinds with an LM head: FSDP keeps all weights of the heads in one unit."""

    # The target's adapter.

    def apply_adapter(self, target: Target | PreTrainedModel, *, merge: bool = False) -> Target:
        """Gives the target the adapter that these heads were trained with (Medusa-2), and binds the heads to it.

            heads = DraftHeads.from_pretrained(path)
            target = heads.apply_adapter(model)
            generate(target, heads, input_ids)

        The text is then the adapted target's. The model itself changes: PEFT inserts layers into the model, and
        `target.model` is the PEFT model around it.

        Args:
            target: as it was loaded, without adapters.
            merge: add the adapter to the model's weights. Decoding is then as fast as without an adapter, the sum is
                rounded to the weights' dtype, and `target.model` is still the model itself.

        Raises:
            ValueError: the heads have no adapter, the heads or the adapter do not fit the target, or peft is missing.
        """
        folder = self.find_adapter()
        target = Target.of(target)
        check_fit(cast(DraftHeadsConfig, self.config), target)
        adapted = Target(load_adapter(target.model, folder, merge=merge))
        self.bind(adapted)
        return adapted

    def find_adapter(self) -> Path:
        """The local folder of the adapter beside loaded heads; from the hub it is downloaded.

        Raises:
            ValueError: there is none.
        """
        if not self._adapter or not isinstance(stored := self._adapter[0], StoredAdapter):
            why = "is not stored yet: save and load them" if self.config.target_adapter else "does not exist"
            raise ValueError(f"the adapter of these heads {why}")
        return stored.find()

    def belong_to_adapter(self, model: nn.Module) -> None:
        """Declares that the adapter of `model`, a PEFT model, is trained along with these heads and saved with them."""
        self.config.target_adapter = FOLDER
        self._adapter[:] = [model]

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
        """`PreTrainedModel.save_pretrained`, but never half-written (see `replace_checkpoint`).

        Args:
            is_main_process: False on the processes that must not write; they do nothing.
            push_to_hub: upload as well, with the keywords of `push_to_hub`; `repo_id` defaults to the directory's name.
            **kwargs: arguments of transformers, such as `state_dict` and `max_shard_size`.
        """
        if not is_main_process:
            return
        directory = Path(save_directory)
        hub_keys = inspect.signature(super().push_to_hub).parameters.keys() - {"max_shard_size"}
        hub = {key: kwargs.pop(key) for key in hub_keys & kwargs.keys()}
        with replace_checkpoint(directory) as scratch:
            super().save_pretrained(scratch, **kwargs)
            if self.token_counts is not None:
                write_counts(scratch, self.token_counts)
            if self.config.target_adapter:
                if not self._adapter:
                    raise ValueError("these heads are a copy without their adapter: save the heads it was copied from")
                write_adapter(self._adapter[0], scratch / self.config.target_adapter)
        if push_to_hub:
            self.push_to_hub(**{"repo_id": directory.resolve().name, **hub})

    @classmethod
    def from_pretrained(  # type: ignore[override, unused-ignore]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        target: Target | PreTrainedModel | None = None,
        draft_vocab_size: int | None = None,
        token_counts: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Loads heads of any kind from a directory, a hub id or a GGUF file.

        Args:
            target: binds the heads to it. With a target, heads in another project's format (EAGLE's, speculators', ...)
                are imported, in the dtype of their files unless `dtype` is given.
            draft_vocab_size: as in `limit_vocabulary`; None = all, or the default said there.
            token_counts: [V] in place of the counts beside the heads.

        Raises:
            ValueError: the directory does not exist or holds no heads; the heads are in another project's format, and
                no target was given, or of an unknown kind; or tensors are missing, unexpected, mis-shaped, truncated or
                not finite, each named; or as `limit_vocabulary`.
        """
        path = str(pretrained_model_name_or_path)
        if kwargs.pop("output_loading_info", False):
            raise ValueError(
                "got output_loading_info: it has nothing to tell, as a wrong tensor is an error; leave it out"
            )
        hub = {key: kwargs[key] for key in HUB_KEYS if key in kwargs}
        head_type = read_head_type(path, **hub)
        if head_type is None:
            if target is None:
                refuse_published(path, **hub)
            if unknown := kwargs.keys() - hub.keys() - {"dtype"}:
                raise ValueError(f"{path} is another project's checkpoint, which is imported without {sorted(unknown)}")
            heads = import_heads(path, Target.of(target), kwargs.get("dtype"), cls, **hub)
        else:
            kind_class = check_kind(head_type, path, cls)
            heads = load_strictly(kind_class, path, *args, **kwargs)
            if heads.config.target_adapter:
                heads._adapter[:] = [StoredAdapter(path, heads.config.target_adapter, hub)]
            if target is not None:
                heads.bind(target)
        heads.token_counts = read_counts(path, **hub) if token_counts is None else token_counts
        if draft_vocab_size is not None:
            heads.limit_vocabulary(draft_vocab_size)
        release_workers()  # those that loaded the target and the heads; another thread may decode
        return heads
