"""The parts of gpu.py. Each yields names with functions that measure, the most valuable first.

Targets and heads of the shapes have random weights, and acceptance is simulated (`counting.py`); the steps are real.
Shares of the roofline compare with the card's own measured rates.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.inference import Decoder, Target
from draftsmith.inference.kernels.attention import attend_masked, can_use_kernel
from draftsmith.inference.kernels.packed_masks import pack_tree, unpack_mask
from draftsmith.inference.targets.masks import compute_ancestors
from draftsmith.inference.text_difference import find_difference
from draftsmith.inference.trees.options import resolve_policy
from draftsmith.scripts.benchmarks.counting import (
    ScriptedTree,
    make_counting_target,
    make_random_heads,
    reduce_vocabulary,
)
from draftsmith.scripts.measuring.roofline import (
    Hardware,
    ProductCounter,
    Work,
    best_seconds,
    count_round,
    measure_bandwidth,
    measure_copy,
    measure_matmul,
)
from draftsmith.scripts.shared.clock import TimeLimit, read_clock
from draftsmith.scripts.shared.model_loading import encode_messages, fit_tree, load_heads, load_target
from draftsmith.training.features.encoding import encode
from draftsmith.training.losses.draft_loss import draft_loss
from draftsmith.training.losses.teacher import compute_teacher

Line = dict[str, Any]
Cases = Iterator[tuple[str, Callable[[], Line]]]

TREES = ("chain:3", "dynamic:3,4,16", "dynamic:5,6,32", "dynamic:5,8,64")
CURVE = ("chain:1", *TREES[:1], "dynamic:3,3,8", *TREES[1:])
LENGTHS = (2, 3, 4)  # simulated acceptance lengths
# Targets with trained heads, where both are there. Rehearsals take the last.
MODELS = {
    "outputs/smollm2-135m": ("examples/heads/smollm2-135m-*",),
    "examples/chat-13m": ("examples/heads/mtp", "examples/heads/eagle3"),
}


@dataclass(frozen=True)
class Setup:
    """is_tiny: toys, a rehearsal."""

    device: torch.device
    is_tiny: bool
    limit: TimeLimit

    @property
    def modes(self) -> dict[str, dict[str, bool]]:
        """How steps run, and the options of `Decoder`; the fastest first."""
        return {"captured": {"graphs": True}, "eager": {}} if self.device.type == "cuda" else {"eager": {}}

    def size(self, size: str) -> str:
        return "tiny" if self.is_tiny else size


Measure = Callable[[Setup], Cases]


class Shape:
    """A target of random weights in bfloat16, its heads, and what plain steps of it took."""

    def __init__(self, size: str, setup: Setup) -> None:
        start = read_clock(setup.device)
        self.setup = setup
        self.target = make_counting_target(setup.size(size), torch.bfloat16, setup.device)
        self.heads: dict[str | None, DraftHeads | None] = {None: None}
        self.heads |= {kind: make_random_heads(kind, self.target) for kind in ("eagle3", "mtp")}
        self.seconds_to_build = read_clock(setup.device) - start
        num_bytes = 2**22 if setup.is_tiny else 2**30
        # A step reads, and writes next to nothing: the faster of the two is what the card can do at least.
        self.read, self.copy = measure_bandwidth(num_bytes, setup.device), measure_copy(num_bytes, setup.device)
        rate = measure_matmul(self.target.dtype, setup.device, size=64 if setup.is_tiny else None)
        self.hardware = Hardware(max(self.read, self.copy), rate)
        self.plain: dict[tuple[int, int], float] = {}  # rows and context -> milliseconds of a captured step

    def describe(self) -> Line:
        rates = {"read GB/s": self.read, "copy GB/s": self.copy}
        rates["bfloat16 TFLOP/s"] = self.hardware.matmul_gflop_s / 1000
        return {"seconds to build": self.seconds_to_build, **rates}

    def list_rounds(
        self, batch: int, context: int, kind: str | None = None, trees: Sequence[str] = ("",), *, num_modes: int = 1
    ) -> Cases:
        """kind: of heads; None = plain decoding."""
        for tree, (mode, options) in product(trees, list(self.setup.modes.items())[:num_modes]):
            words = [kind or "plain", tree, mode, f"{batch} x {context}"]
            name = ", ".join(word for word in words if word)
            yield name, partial(self.time_rounds, batch, context, kind, tree, **options)

    def time_rounds(self, batch: int, context: int, kind: str | None, tree: str, **options: Any) -> Line:
        """Milliseconds of a step and of its phases; tokens a second of all rows at each simulated acceptance length."""
        target, drafter, device = self.target, self.heads[kind], self.setup.device
        script = None
        if drafter is not None:
            policy = resolve_policy(fit_tree(tree, drafter.max_depth), drafter.max_depth)
            script = ScriptedTree(policy, target.vocab_size, device)
        decoder = Decoder(target, drafter, tree=script, **options)
        context, steps = (40, 2) if self.setup.is_tiny else (context, 16)
        prompt = torch.arange(context, device=device) + 997 * torch.arange(batch, device=device)[:, None]
        prompt %= target.vocab_size
        line: Line = {}
        for length in [1] if script is None else [one for one in LENGTHS if one <= 1 + script.most_right]:
            if script is not None:
                script.num_right.fill_(length - 1)
            decode = partial(self._decode, decoder, prompt, steps, length)
            decode()  # graphs are made
            milliseconds = decode()["step"]
            if not line:
                decoder.is_synchronised = True
                parts = {f"{name} ms": value for name, value in decode().items() if name in ("draft", "verify")}
                decoder.is_synchronised = False
                line = {"step ms": milliseconds, **(parts if drafter is not None else {})}
                one = count_round(target, drafter, script, prompt[:1], max_new_tokens=1 + 3 * length)
                work = Work(one.weight_bytes, one.flops * batch)  # the weights are read once for all rows
                line["of the roofline"] = work.limit_milliseconds(self.hardware) / milliseconds
            line[f"tokens/s at {length}"] = 1000 * batch * length / milliseconds
            if kind is None:
                self.plain.setdefault((batch, context), milliseconds)
            elif (batch, context) in self.plain:
                line[f"x plain at {length}"] = length * self.plain[batch, context] / milliseconds
        return line

    def _decode(self, decoder: Decoder, prompt: Tensor, steps: int, length: int) -> dict[str, float]:
        """Milliseconds of the parts of a step. The text must count on: otherwise other work was timed."""
        number = 1 + steps * length
        output = decoder.generate(prompt, max_new_tokens=number, do_sample=False)
        expected = prompt[:, -1:] + torch.arange(1, number + 1, device=prompt.device)
        if not torch.equal(output.sequences[:, prompt.shape[1] :], expected % self.target.vocab_size):
            raise RuntimeError(f"the target of random weights does not count: {output.sequences[0].tolist()[-8:]}")
        return output.stats.split_step()

    def time_generate(self, **options: Any) -> Line:
        """transformers' own, without the prompt: the difference of two lengths."""
        context, device = (40 if self.setup.is_tiny else 512), self.setup.device
        prompt = torch.arange(context, device=device)[None]
        seconds = {}
        for number in (4, 4, 36):  # the first one warms up
            start = read_clock(device)
            self.target.model.generate(prompt, do_sample=False, max_new_tokens=number, **options)
            seconds[number] = read_clock(device) - start
        milliseconds = 1000 * (seconds[36] - seconds[4]) / 32
        limit = count_round(self.target, None, None, prompt, max_new_tokens=4).limit_milliseconds(self.hardware)
        return {"ms a token": milliseconds, "of the roofline": limit / milliseconds}


def measure_shape(size: str, setup: Setup) -> Cases:
    shape = Shape(size, setup)
    yield "hardware", shape.describe
    yield from shape.list_rounds(1, 512, num_modes=2)
    yield from shape.list_rounds(1, 512, "eagle3", TREES[:1], num_modes=2)
    yield from shape.list_rounds(1, 512, "eagle3", TREES[1:])
    yield "transformers generate, eager", shape.time_generate
    yield from shape.list_rounds(1, 512, "mtp", TREES[::2])
    yield from shape.list_rounds(8, 512)
    yield from shape.list_rounds(8, 512, "eagle3", TREES)
    yield from shape.list_rounds(1, 4096)
    yield from shape.list_rounds(1, 4096, "eagle3", CURVE)
    yield from shape.list_rounds(1, 512, "eagle3", [tree for tree in CURVE if tree not in TREES])
    yield from shape.list_rounds(8, 512, "mtp", TREES)
    yield from shape.list_rounds(1, 512, "mtp", TREES[1::2])


def measure_compiled(setup: Setup) -> Cases:
    """Last, since compiling takes minutes."""
    shape = Shape("1B", setup)
    yield "transformers generate, static cache", partial(shape.time_generate, cache_implementation="static")
    yield "plain, compiled", partial(shape.time_rounds, 1, 512, None, "", compile=True)
    yield "eagle3, chain:3, compiled", partial(shape.time_rounds, 1, 512, "eagle3", "chain:3", compile=True)


class Texts:
    """A real target's texts of some prompts, greedy or sampled, with and without drafts."""

    def __init__(self, name: str, dtype: str, setup: Setup) -> None:
        self.setup = setup
        self.target, tokenizer = load_target(name, dtype=dtype, device=str(setup.device))
        with Path("examples/prompts.jsonl").open(encoding="utf-8") as file:
            turns = [json.loads(line)["turns"][0] for line in file][: 1 if setup.is_tiny else 8]
        messages = [[{"role": "user", "content": turn}] for turn in turns]
        self.prompts = [encode_messages(tokenizer, one).to(setup.device) for one in messages]
        self.expected: dict[float, list[list[int]]] = {}

    def decode(self, heads: str | None, mode: str, temperature: float) -> Line:
        drafter = None if heads is None else load_heads(heads, self.target)
        tree = None if drafter is None else TREES[1]
        decoder = Decoder(self.target, drafter, tree=tree, **self.setup.modes[mode])
        options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": 8 if self.setup.is_tiny else 64}
        if temperature:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": 0}
        for prompt in self.prompts:  # graphs are made
            decoder.generate(prompt, **options)
        start, outputs = read_clock(self.setup.device), [decoder.generate(prompt, **options) for prompt in self.prompts]
        seconds = read_clock(self.setup.device) - start
        texts = [
            output.sequences[0, prompt.shape[1] :].tolist()
            for output, prompt in zip(outputs, self.prompts, strict=True)
        ]
        stats = [output.stats for output in outputs]
        line: Line = {"tokens/s": sum(map(len, texts)) / seconds}
        line["acceptance length"] = sum(stats[1:], stats[0]).acceptance_length
        expected = self.expected.setdefault(temperature, texts)
        line["same texts"] = sum(one == other for one, other in zip(texts, expected, strict=True))
        line["texts"] = len(texts)
        found = [
            find_difference(self.target, *pair, **options) for pair in zip(self.prompts, expected, texts, strict=True)
        ]
        line["near-ties"] = sum(one is not None and one.is_near_tie for one in found)
        return line


def measure_models(setup: Setup) -> Cases:
    models = list(MODELS.items())[-1 if setup.is_tiny else 0 :]
    for (model, patterns), dtype in product(models, ("bfloat16", "float32")):
        if not Path(model).is_dir():
            continue
        texts = Texts(model, dtype, setup)
        heads = sorted(str(path) for pattern in patterns for path in Path().glob(pattern))
        for temperature, name, mode in product((0.0, 1.0), (None, *heads), reversed(setup.modes)):
            label = f"{Path(model).name}, {dtype}, T = {temperature:g}, {Path(name).name if name else 'plain'}, {mode}"
            yield label, partial(texts.decode, name, mode, temperature)


def measure_attention(setup: Setup) -> Cases:
    for context, nodes in product((64,) if setup.is_tiny else (512, 4096, 32768), (1, 4, 16, 64)):
        yield f"{nodes} nodes after {context}", partial(time_attention, context, nodes, setup)
    for rows in (1, 16, 64):
        yield f"product of {rows} rows", partial(time_product, rows, setup)


def time_attention(context: int, nodes: int, setup: Setup) -> Line:
    """Microseconds of a layer of the 8B shape: sdpa with a mask, and the Triton kernels."""
    device, slots = setup.device, context + nodes
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    query, key, value = draw(1, 32, nodes, 128), draw(1, 8, slots, 128), draw(1, 8, slots, 128)
    ancestors = compute_ancestors((torch.arange(nodes, device=device)[None] - 1) // 2)
    length, zero = torch.tensor([[context]], device=device), torch.zeros(1, dtype=torch.long, device=device)
    packed = pack_tree(ancestors, length, length, origin=zero, window=None)
    mask = unpack_mask(packed, slots, torch.bfloat16)
    line = {"sdpa us": 1e6 * best_seconds(lambda: attend_masked(query, key, value, mask), device)}
    if can_use_kernel(device):
        from draftsmith.inference.kernels.triton_kernel import attend_packed

        line["triton us"] = 1e6 * best_seconds(lambda: attend_packed(query, key, value, packed, 128**-0.5), device)
    return line


def time_product(rows: int, setup: Setup) -> Line:
    """Microseconds of the first product of an MLP of the 8B shape: torch's, and batch-invariant mode's."""
    inputs, outputs = (64, 128) if setup.is_tiny else (4096, 14336)
    draw = partial(torch.randn, device=setup.device, dtype=torch.bfloat16)
    given, weight = draw(rows, inputs), draw(outputs, inputs)
    line = {"torch us": 1e6 * best_seconds(lambda: torch.nn.functional.linear(given, weight), setup.device)}
    if can_use_kernel(setup.device):
        from draftsmith.inference.kernels.triton_linear import multiply_rows

        line["triton us"] = 1e6 * best_seconds(lambda: multiply_rows(given, weight, None), setup.device)
    return line


def run_tests(setup: Setup) -> Cases:
    """tests/gpu, the quickest first."""
    selections = [["-m", "gpu", "-k", "not compiled"], ["-m", "gpu", "-k", "compiled"]]
    if setup.device.type == "cpu":
        selections = [["-k", "accepted and cpu and eagle3 and eager"]]
    for words in selections:
        yield words[-1], partial(run_selection, words, setup)


def run_selection(words: Sequence[str], setup: Setup) -> Line:
    """How many tests had which result until the time was over; the names of those that failed, or why none ran."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "-p", "no:cacheprovider", *words]
    with TemporaryFile("w+", encoding="utf-8") as output:
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                process.wait(setup.limit.left)
            except subprocess.TimeoutExpired:
                process.kill()
        output.seek(0)
        text = output.read()
    results = re.findall(r"^(tests/\S+) (PASSED|FAILED|ERROR|SKIPPED)", text, re.M)
    failed = ", ".join(name for name, result in results if result in ("FAILED", "ERROR"))
    if not results and not setup.limit.is_over:
        failed = text[-300:]
    counted = Counter(result.lower() for _, result in results if result in ("PASSED", "SKIPPED"))
    return {**counted, **({"failed": failed} if failed else {})}


class TrainingStep:
    """A step of heads on random tokens: the target's states, the draft with its loss and gradients, the optimizer."""

    def __init__(self, kind: str, target: Target, setup: Setup) -> None:
        torch.manual_seed(0)
        self.target, self.device = target, setup.device
        self.rate = measure_matmul(target.dtype, setup.device, size=64 if setup.is_tiny else None)
        self.heads: DraftHeads = create_heads(kind, target, **reduce_vocabulary(kind, target)).train()
        if self.heads.wants_token_counts:
            self.heads.fit_vocabulary(torch.arange(target.vocab_size))
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), lr=0.0)
        self.input_ids = torch.randint(target.vocab_size, (1, 64 if setup.is_tiny else 2048), device=self.device)
        self.loss_mask = torch.ones(self.input_ids.shape, dtype=torch.long)
        self.loss_mask[:, : self.input_ids.shape[1] // 4] = 0

    def run(self) -> None:
        loss_type = "distillation"
        with torch.autocast(self.device.type, torch.bfloat16):
            states = encode(self.target, self.input_ids, self.loss_mask, feature_layers=self.heads.feature_layers)
            teacher = compute_teacher(
                self.target, states.last_hidden, self.input_ids, self.loss_mask, self.heads.draft_token_ids,
                loss_type=loss_type,
            )  # fmt: skip
            output = self.heads(
                states.features,
                self.input_ids,
                loss_fn=lambda steps: draft_loss(steps, teacher, self.loss_mask, loss_type=loss_type),
                loss_mask=self.loss_mask,
            )
        output.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def time(self) -> Line:
        self.run()
        with ProductCounter() as counter:
            self.run()
        self.run()
        start = read_clock(self.device)
        for _ in range(3):
            self.run()
        seconds = (read_clock(self.device) - start) / 3
        line = {"step ms": 1000 * seconds, "tokens/s": self.input_ids.numel() / seconds}
        return {**line, "MFU": counter.flops / seconds / (1e9 * self.rate)}


def measure_training(setup: Setup) -> Cases:
    for size in ("1B", "8B"):
        target = make_counting_target(setup.size(size), torch.bfloat16, setup.device)
        for kind in ("eagle3", "mtp", "block"):
            yield f"{size}, {kind}", lambda kind=kind, target=target: TrainingStep(kind, target, setup).time()


# The most valuable first: name -> the most seconds that it takes, and its measurements.
PARTS: dict[str, tuple[float, Measure]] = {
    "8B": (100, partial(measure_shape, "8B")),
    "models": (60, measure_models),
    "1B": (60, partial(measure_shape, "1B")),
    "attention": (40, measure_attention),
    "tests": (120, run_tests),
    "training": (100, measure_training),
    "compiled": (600, measure_compiled),
}
