"""Computes and stores the target's states of a data set.

The plan depends only on the rows and the options: shards of about `shard_mb`, rows in the order of the data, each text
once. So any number of processes writes the same shards, each every `num_processes`-th, and an interrupted extraction
continues with the missing ones.

Legend: B batch, T tokens of a row.
"""

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedConfig

from draftsmith.heads import DraftHeadsConfig
from draftsmith.heads.adapter import find_adapter_of, load_adapter
from draftsmith.heads.checkpoint import read_head_type
from draftsmith.heads.registration import find_kind
from draftsmith.inference.targets.files import read_tokenizer
from draftsmith.inference.targets.model_config import find_length_limit
from draftsmith.inference.targets.target import Target
from draftsmith.training.data.collation import ConversationCollator, hash_tokens, iterate_column
from draftsmith.training.data.options import DataArguments, option, require_positive
from draftsmith.training.data.set_statistics import describe_size, row_lengths
from draftsmith.training.data.training_sets import cut_to_limit, load_every_row
from draftsmith.training.features.endpoint_states import NUM_LAYERS, EndpointStates, refuse_without_target
from draftsmith.training.features.sources import OnlineFeatures
from draftsmith.training.features.store import (
    StoredRow,
    StoreSettings,
    finished_shards,
    hash_text,
    name_tensors,
    read_settings,
    tensor_name,
    write_settings,
    write_shard,
)
from draftsmith.training.features.store_checks import check_same_target, explain_date, identify_target
from draftsmith.training.features.target_loading import (
    FirstLayers,
    check_placement,
    load_first_layers,
    load_model,
    load_published_heads,
)
from draftsmith.training.features.target_options import EndpointArguments, ModelArguments, PlacementArguments

logger = logging.getLogger(__name__)


@dataclass
class ExtractionArguments(EndpointArguments):
    """Where to store, and who computes the states."""

    output_dir: str = option(help="Folder for the features.")
    batch_size: int = option(default=8, help="Rows per pass of the target.")
    shard_mb: float = option(default=512, help="Size of a shard in megabytes; memory holds three.")
    endpoint: str | None = option(
        default=None,
        help="Base URL of a vLLM server that computes the states, such as http://localhost:8000/v1; without a server, "
        "the program prints the command that starts it. The key is read from the environment variable OPENAI_API_KEY.",
    )

    def __post_init__(self) -> None:
        require_positive(self, ("batch_size", "shard_mb"))
        if self.endpoint is not None and self.batch_size != type(self).batch_size:
            raise ValueError(
                f"got batch_size {self.batch_size} with endpoint: the server makes its own batches; leave it out"
            )
        self.check_endpoint("endpoint")


# The program's options; those of NOT_FROM_FILE mean something else in a training run's --config file.
OPTION_CLASSES = (ModelArguments, DataArguments, PlacementArguments, ExtractionArguments)
NOT_FROM_FILE = ("output_dir",)


@dataclass(frozen=True)
class Plan:
    """shards: the numbers of the rows of each. num_tokens: of all of them. data_hash: of the texts in order."""

    shards: list[list[int]]
    num_rows: int
    num_tokens: int
    data_hash: str


def plan_shards(rows: Any, *, bytes_per_token: int, shard_bytes: int) -> Plan:
    """Assigns each text once, in order, to shards of up to `shard_bytes`, at least one row each."""
    shards: list[list[int]] = []
    seen: set[int] = set()
    num_tokens = size = 0
    for number, input_ids in enumerate(iterate_column(rows, "input_ids")):
        key = hash_tokens(input_ids)
        if key in seen:
            continue
        seen.add(key)
        need = len(input_ids) * bytes_per_token
        if not shards or size + need > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(number)
        size += need
        num_tokens += len(input_ids)
    return Plan(shards, len(seen), num_tokens, hash_text(repr(sorted(seen)) + repr(shards)))


# Gives the states of rows: from the numbers of the rows of each shard, (shard, row number, row), shard by shard.
ComputeRows = Callable[[Mapping[int, Sequence[int]]], Iterable[tuple[int, int, StoredRow]]]


class Extraction:
    """Computes the states of rows (column `input_ids`) and writes them shard by shard.

    Args:
        settings: of the store; the plan's numbers are added here.
        compute: gives the states (`compute_here`, `EndpointStates.read_rows`).

    Raises:
        ValueError: the folder holds other features.
    """

    def __init__(self, rows: Any, settings: StoreSettings, args: ExtractionArguments, *, compute: ComputeRows) -> None:
        shard_bytes = int(args.shard_mb * 10**6)
        self.plan = plan_shards(rows, bytes_per_token=settings.bytes_per_token, shard_bytes=shard_bytes)
        self.settings = replace(settings, num_shards=len(self.plan.shards), data_hash=self.plan.data_hash)
        self.rows, self.compute, self.folder = rows, compute, Path(args.output_dir)
        if (self.folder / "index.json").exists():
            self._check_same_features()
        else:
            write_settings(self.folder, self.settings)

    def _check_same_features(self) -> None:
        stored = read_settings(self.folder)
        check_same_target(self.folder, stored.target, self.settings.target)
        one, other = (dataclasses.asdict(settings) for settings in (stored, self.settings))
        different = [
            f"{key} was {one[key]!r}, now {other[key]!r}" for key in one if key != "target" and one[key] != other[key]
        ]
        if different:
            raise ValueError(
                f"{self.folder} holds other features ({'; '.join(different)}): give another --output_dir, or the "
                "options of its first run to continue it"
            )

    def run(
        self, *, rank: int = 0, num_processes: int = 1, progress: Callable[[int], Any] = lambda num_tokens: None
    ) -> int:
        """Writes this process's missing shards; returns the number of tokens computed.

        `progress` is called with the number of tokens that are computed or found. A full disk raises DiskFullError.
        """
        computed, finished = 0, finished_shards(self.folder)
        names = {number: f"shard-{number:05d}" for number in range(rank, len(self.plan.shards), num_processes)}
        for number in [number for number, name in names.items() if name in finished]:
            progress(sum(len(self.rows[index]["input_ids"]) for index in self.plan.shards[number]))
            del names[number]
        found = self.compute({number: self.plan.shards[number] for number in names})
        with ThreadPoolExecutor(1) as writer:  # one shard is written while the next one is computed
            written: Future[None] | None = None
            for number, group in itertools.groupby(found, key=lambda entry: entry[0]):
                rows: dict[int, StoredRow] = {}
                for _, index, row in group:
                    rows[index] = row
                    computed += len(row.input_ids)
                    progress(len(row.input_ids))
                if written is not None:
                    written.result()
                ordered = [rows.pop(index) for index in self.plan.shards[number]]
                written = writer.submit(write_shard, self.folder, names[number], ordered)
                del ordered
            if written is not None:
                written.result()
        return computed


@torch.no_grad()
def compute_here(
    target: Target, rows: Any, shards: Mapping[int, Sequence[int]], *, layers: Sequence[int], batch_size: int
) -> Iterator[tuple[int, int, StoredRow]]:
    """Runs the target on batches of rows of similar lengths, to pad little; yields as `ComputeRows`.

    Args:
        rows: with a column `input_ids`.
        layers: the hidden states to store, besides the last (`find_layers`).
    """
    collate, online, width = ConversationCollator(pad_token_id=0), OnlineFeatures(target, layers), target.hidden_size
    for shard, numbers in shards.items():
        kept = {index: rows[index] for index in numbers}
        indices = sorted(kept, key=lambda index: len(kept[index]["input_ids"]))
        for start in range(0, len(indices), batch_size):
            part = indices[start : start + batch_size]
            batch: dict[str, Any] = collate([kept[index] for index in part])
            states = online({**batch, "input_ids": batch["input_ids"].to(target.device)})
            found = {
                tensor_name(layer, target.num_layers): states.features[..., i * width : (i + 1) * width]
                for i, layer in enumerate(layers)
            }
            tensors = {name: value.cpu() for name, value in {**found, "last": states.last_hidden}.items()}
            for place, index in enumerate(part):
                count = len(kept[index]["input_ids"])
                values = {name: value[place, :count].clone() for name, value in tensors.items()}
                yield shard, index, StoredRow(batch["input_ids"][place, :count], values)


def find_layers(model_args: ModelArguments, target: Target) -> Sequence[int]:
    """Returns the hidden states that the heads tap; 0 = embeddings."""
    if model_args.init_heads is not None and read_head_type(model_args.init_heads) is None:
        return load_published_heads(model_args, target).feature_layers
    if model_args.init_heads is not None:
        layers: Sequence[int] = PreTrainedConfig.get_config_dict(model_args.init_heads)[0].get("feature_layers", ())
        return layers
    assert model_args.head_type is not None
    kind: type[DraftHeadsConfig] = find_kind(model_args.head_type).config_class
    return kind.from_target(target, **model_args.parse_head_overrides()).feature_layers


def load_target(model_args: ModelArguments, placement: PlacementArguments, *, rank: int, num_processes: int) -> Target:
    """Loads the target that computes the states, on this process's device, with the adapter of `init_heads`."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    model = load_model(model_args, placement, device, num_processes=num_processes)
    if model_args.init_heads is not None and (adapter := find_adapter_of(model_args.init_heads)) is not None:
        model = load_adapter(model, adapter, merge=False)
    target = Target(model)
    check_placement(target, device)
    return target


def prepare_extraction(
    model_args: ModelArguments,
    data_args: DataArguments,
    placement: PlacementArguments,
    args: ExtractionArguments,
    *,
    rank: int,
    num_processes: int,
) -> Extraction:
    """Loads the target, or connects to the server that has it, and the data.

    Raises:
        ValueError, OSError: see `extract_features`.
    """
    if args.endpoint is None:
        target = load_target(model_args, placement, rank=rank, num_processes=num_processes)
    else:
        refuse_without_target(model_args, placement)
        target = load_first_layers(model_args, NUM_LAYERS)
    tokenizer = read_tokenizer(model_args.target, trust_remote_code=model_args.trust_remote_code)
    data_args = cut_to_limit(data_args, find_length_limit(target.text_config), has_warning=rank == 0)
    rows, layers = load_every_row(data_args, tokenizer), find_layers(model_args, target)
    if "media" in rows.column_names:
        raise ValueError("the conversations have images, whose states are not stored: train without --features")
    if (hint := explain_date(tokenizer)) and rank == 0:
        logger.warning("the features of %s are of today%s", args.output_dir, hint)
    settings = StoreSettings(identify_target(target, model_args.target), name_tensors(layers, target.num_layers))
    if not isinstance(target, FirstLayers):
        compute = partial(compute_here, target, rows, layers=layers, batch_size=args.batch_size)
        return Extraction(rows, settings, args, compute=compute)
    states = EndpointStates(
        target,
        args,
        url=cast(str, args.endpoint),
        layers=layers,
        target_name=model_args.target,
        max_length=max(row_lengths(rows)),
    )
    first = torch.tensor(rows[0]["input_ids"])
    states.check_target(first)
    extraction = Extraction(rows, settings, args, compute=partial(states.read_rows, rows))
    states.check_stored(extraction.folder, first)
    return extraction


def extract_features(
    model_args: ModelArguments,
    data_args: DataArguments,
    placement: PlacementArguments,
    args: ExtractionArguments,
    *,
    rank: int = 0,
    num_processes: int = 1,
    say: Callable[[str], Any] = logger.info,
) -> int:
    """Loads the target and the data, and writes this process's shards; returns the number of tokens computed.

    Raises:
        ValueError, OSError: wrong options, files or folders, or a full disk.
    """
    if placement.shard_target != "none":
        raise ValueError(
            f"got shard_target {placement.shard_target}: each process extracts its own texts, and cannot wait for the "
            "others at every layer. Spread the target over the devices of one process (--target_device_map auto)"
        )
    if data_args.streaming:
        raise ValueError("got streaming: an extraction reads the set to its end; leave streaming out")
    extraction = prepare_extraction(model_args, data_args, placement, args, rank=rank, num_processes=num_processes)
    settings = extraction.settings
    plan = extraction.plan
    size = plan.num_tokens * settings.bytes_per_token  # without each shard's header and table of rows (some kB)
    written = sum(path.stat().st_size for path in extraction.folder.glob("*.safetensors"))
    say(
        f"{plan.num_rows} texts, {plan.num_tokens} tokens x {settings.bytes_per_token} bytes "
        f"({', '.join(settings.tensors)} in {settings.target.dtype}) = {describe_size(size)} in "
        f"{len(plan.shards)} shards; {describe_size(max(0, size - written))} are left to write"
    )
    mine = sum(len(extraction.rows[row]["input_ids"]) for shard in plan.shards[rank::num_processes] for row in shard)
    with tqdm(total=mine, unit=" tokens", unit_scale=True, disable=rank != 0) as progress:
        computed = extraction.run(rank=rank, num_processes=num_processes, progress=progress.update)
    done = len(finished_shards(extraction.folder))
    say(f"{extraction.folder}: {done} of {len(plan.shards)} shards are complete, {computed} tokens computed now")
    return computed
