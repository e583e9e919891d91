"""MTP modules of a target's own checkpoint, in each family's names, against the family's layers run without a cache and
against transformers' own MTP model.

Legend: B batch, T sequence length, D hidden size, V vocabulary.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel

from draftsmith.heads import DraftHeads
from draftsmith.heads.kinds.mtp import MTPHeads
from draftsmith.inference import Target, generate
from tests.heads.test_contract import Prefix, assert_scores, assert_tree_matches
from tests.heads.tiny_heads import encode_for
from tests.params import slow_but
from tests.tiny_targets import RECURRENT_FAMILIES, SHAPE, random_prompt, tiny_target

MIXTURE: dict[str, Any] = {**SHAPE, "num_hidden_layers": 2, "initializer_range": 0.3, "moe_intermediate_size": 24}
MIXTURE |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}


def tiny_mixture(family: str, **changes: Any) -> PreTrainedModel:
    """A target of experts, with latent attention (DeepSeek-V3) or without (GLM-4-MoE)."""
    torch.manual_seed(0)
    if family == "deepseek_v3":
        latent = {
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "num_key_value_heads": 4,
        }
        return DeepseekV3ForCausalLM(DeepseekV3Config(**{**MIXTURE, **latent, **changes})).eval()
    heads = {"head_dim": 8, "num_key_value_heads": 2}
    return Glm4MoeForCausalLM(Glm4MoeConfig(**{**MIXTURE, **heads, **changes})).eval()


@dataclass
class Module:
    """One random MTP module: its norms' weights and projection by our names, and the family's decoder layer."""

    parts: dict[str, Tensor]
    layer: nn.Module


def random_modules(model: PreTrainedModel, count: int) -> list[Module]:
    torch.manual_seed(5)
    decoder: Any = model.get_decoder()
    modules = []
    for index in range(count):
        layer = type(decoder.layers[-1])(model.config, decoder.config.num_hidden_layers - 1).eval()
        layer.self_attn.layer_idx = index
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape) * (parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1)
                )
            for name, buffer in layer.named_buffers():
                if "e_score_correction_bias" in name:
                    buffer.copy_(torch.randn(buffer.shape))
        size = decoder.config.hidden_size
        parts = {name: 1 + 0.2 * torch.randn(size) for name in ("enorm", "hnorm", "norm")}
        modules.append(Module({**parts, "eh_proj": torch.randn(size, 2 * size) / 8}, layer))
    return modules


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As checkpoints have them: a tensor per expert and matrix."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for number, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                split[name.replace("gate_up_proj", f"{number}.gate_proj.weight")] = gate.clone()
                split[name.replace("gate_up_proj", f"{number}.up_proj.weight")] = up.clone()
        elif name.endswith("experts.down_proj"):
            for number, matrix in enumerate(tensor):
                split[name.replace("down_proj", f"{number}.down_proj.weight")] = matrix.clone()
        else:
            split[name] = tensor
    return split


DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
MIMO = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"}


def name_one(module: Module, names: dict[str, str], prefix: str, layer: str) -> dict[str, Tensor]:
    tensors = {f"{prefix}.{theirs}.weight": module.parts[ours] for ours, theirs in names.items()}
    return tensors | {f"{layer}.{name}": tensor for name, tensor in module.layer.state_dict().items()}


def name_as_deepseek(modules: list[Module], num_layers: int) -> dict[str, Tensor]:
    tensors = {}
    for prefix, module in ((f"model.layers.{num_layers + index}", module) for index, module in enumerate(modules)):
        copies = (f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight")
        tensors |= name_one(module, DEEPSEEK, prefix, prefix) | {name: torch.zeros(128, 32) for name in copies}
    return split_experts(tensors)


def name_as_qwen(modules: list[Module], _: int) -> dict[str, Tensor]:
    return name_one(modules[0], QWEN, "mtp", "mtp.layers.0")


def name_as_mimo(modules: list[Module], _: int) -> dict[str, Tensor]:
    return name_one(modules[0], MIMO, "model.mtp_layers.0", "model.mtp_layers.0")


def write_checkpoint(model: PreTrainedModel, tensors: dict[str, Tensor], path: Path) -> Path:
    """A checkpoint as the target's authors publish it: MTP tensors in a shard of their own."""
    path.mkdir(exist_ok=True)
    own = {f"model.{name}": tensor.clone() for name, tensor in model.get_decoder().state_dict().items()}
    own["lm_head.weight"] = model.get_output_embeddings().weight.detach().clone()
    shards = {"model-00001-of-00002.safetensors": own, "model-00002-of-00002.safetensors": tensors}
    weight_map = {}
    for file_name, shard in shards.items():
        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, path / file_name)
        weight_map.update(dict.fromkeys(shard, file_name))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    model.config.save_pretrained(path)
    return path


@dataclass
class Case:
    model: Callable[[], PreTrainedModel]
    names: Callable[[list[Module], int], dict[str, Tensor]]
    num_modules: int = 1
    is_mimo: bool = False
    zeroes_first: bool = True


CASES = {
    "deepseek": Case(lambda: tiny_mixture("deepseek_v3"), name_as_deepseek),
    "glm": Case(lambda: tiny_mixture("glm4_moe"), name_as_deepseek),
    "glm, two modules": Case(lambda: tiny_mixture("glm4_moe"), name_as_deepseek, num_modules=2),
    "qwen": Case(lambda: tiny_target("qwen3", num_hidden_layers=2), name_as_qwen, zeroes_first=False),
    "gemma": Case(
        lambda: tiny_target("gemma3", num_hidden_layers=2, layer_types=["full_attention"] * 2),
        name_as_qwen,
        zeroes_first=False,
    ),
    "mimo": Case(lambda: tiny_target("qwen2", num_hidden_layers=2), name_as_mimo, is_mimo=True),
}
if RECURRENT_FAMILIES:  # their MTP layers have attention
    CASES |= {
        "qwen3_next": Case(
            lambda: tiny_target("qwen3_next"), lambda *given: split_experts(name_as_qwen(*given)), zeroes_first=False
        ),
        "qwen3_5": Case(lambda: tiny_target("qwen3_5"), name_as_qwen, zeroes_first=False),
    }
UP = "mtp.layers.0.mlp.up_proj.weight"
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def load(case: Case, path: Path, **overrides: Any) -> tuple[PreTrainedModel, list[Module], MTPHeads]:
    model = case.model()
    with torch.no_grad():
        model.get_decoder().norm.weight.uniform_(0.5, 2.0)
    modules = random_modules(model, case.num_modules)
    write_checkpoint(model, case.names(modules, model.config.num_hidden_layers), path)
    return model, modules, MTPHeads.from_target_checkpoint(path, Target(model), **overrides)


def states_before_final_norm(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    caught: list[Tensor] = []
    hook = model.get_decoder().norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    model(input_ids)
    hook.remove()
    return caught[0]


def run_modules(case: Case, model: Any, modules: list[Module], input_ids: Tensor) -> list[Tensor]:
    """Logits [B, T - 1 - d, V] of each depth d: the family's own layers, causal, without a cache."""
    decoder = model.get_decoder()
    norm_class = type(decoder.norm)
    length = input_ids.shape[1]
    state = model(input_ids, output_hidden_states=True).hidden_states[-1]
    if case.is_mimo:
        state = states_before_final_norm(model, input_ids)
    logits = []
    for depth, module in enumerate(modules):
        norms = {}
        for name in ("enorm", "hnorm", "norm"):
            norms[name] = norm_class(32, eps=model.config.rms_norm_eps)
            norms[name].weight.copy_(module.parts[name])
        tokens = decoder.embed_tokens(input_ids[:, depth + 1 :])
        if case.zeroes_first and depth == 0:
            tokens[:, 0] = 0
        state = state[:, : tokens.shape[1]]
        pair = [norms["enorm"](tokens), norms["hnorm"](state)]
        x = torch.cat(pair[::-1] if case.is_mimo else pair, dim=-1) @ module.parts["eh_proj"].T
        count = length - 1 - depth
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        positions = torch.arange(count)[None] + depth
        kwargs = {"layer_type": "full_attention"} if type(model).__name__.startswith("Gemma3") else {}
        output = module.layer(
            x,
            attention_mask=mask.expand(len(input_ids), -1, -1, -1),
            position_ids=positions,
            position_embeddings=decoder.rotary_emb(x, positions, **kwargs),
        )
        state = norms["norm"](output[0] if isinstance(output, tuple) else output)
        logits.append(model.lm_head(state))
    return logits


@every_case
def test_unroll_equals_the_familys_own_layers(case: Case, tmp_path: Path) -> None:
    model, modules, heads = load(case, tmp_path)
    input_ids = random_prompt(12, batch_size=2)
    features = encode_for(heads, input_ids).features
    steps = heads.unroll(features, input_ids)
    for step, logits in zip(steps, run_modules(case, model, modules, input_ids), strict=False):
        found = step.head(step.hidden[:, : logits.shape[1]])
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    assert len(steps) == (3 if case.num_modules == 1 else case.num_modules)
    assert heads.max_depth == (None if case.num_modules == 1 else case.num_modules)


@every_case
def test_decoding_equals_the_unroll(case: Case, tmp_path: Path) -> None:
    _, _, heads = load(case, tmp_path)
    prefix = Prefix(heads, [9, 3, 14])
    state = heads.start(3, 32, 32)
    prefix.extend(state, [0, 0, 0], [5, 1, 7])
    found = prefix.extend(state, [5, 1, 7], prefix.counts.tolist())
    for row in range(3):
        assert_scores(found[row], prefix.expected(row, []))
    assert_tree_matches(prefix, state)


@pytest.mark.parametrize("case", slow_but({"glm, two modules", "mimo"}, CASES))
def test_text_is_the_targets_own_and_survives_saving(case: Case, tmp_path: Path) -> None:
    _, _, heads = load(case, tmp_path / "target")
    prompt = random_prompt(7)
    plain = generate(heads.target, None, prompt, max_new_tokens=12, do_sample=False)
    drafted = generate(heads.target, heads, prompt, max_new_tokens=12, do_sample=False, tree="dynamic")
    assert torch.equal(drafted.sequences, plain.sequences)
    heads.save_pretrained(tmp_path / "heads")
    loaded = DraftHeads.from_pretrained(tmp_path / "heads").bind(heads.target)
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    again = generate(loaded.target, loaded, prompt, max_new_tokens=12, do_sample=False, tree="dynamic")
    assert again.stats.accepted_histogram == drafted.stats.accepted_histogram


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("num_modules", [1, 3])
def test_drafts_are_those_of_transformers(family: str, num_modules: int, tmp_path: Path) -> None:
    """Its MTP model over the same tensors: drafted tokens and logits, for a prompt and then for a few tokens more."""
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this release of transformers has no MtpModel")
    case = Case(lambda: tiny_mixture(family), name_as_deepseek, num_modules)
    model, modules, heads = load(case, tmp_path, zero_first_embedding=False)
    model.config.num_nextn_predict_layers = num_modules
    reference = modeling_layers.MtpModel(model, num_modules).eval()
    for layer, module in zip(reference.layers, modules, strict=True):
        for ours, theirs in (("enorm", "enorm"), ("hnorm", "hnorm"), ("norm", "post_norm"), ("eh_proj", "eh_proj")):
            getattr(layer, theirs).weight.copy_(module.parts[ours])
        layer.mtp_block.load_state_dict(module.layer.state_dict())
    input_ids = random_prompt(9)
    hidden = model(input_ids, output_hidden_states=True).hidden_states[-1]
    for length in (6, 9):
        slots = length - 1
        tokens, logits, _ = reference(
            input_ids=input_ids[:, 1:length],
            last_hidden_states=hidden[:, :slots],
            attention_mask=None,
            position_ids=torch.arange(1, length)[None],
            mtp_cache=cache_utils.MtpCache(config=model.config.get_mtp_config()),
        )
        state = heads.start(1, 16, 8)
        draft = heads.extend(state, hidden[:, :slots], input_ids[:, 1:length], torch.tensor([slots]), max_slots=slots)
        for depth in range(num_modules):
            torch.testing.assert_close(draft.logits[:, 0], logits[:, depth], rtol=1e-4, atol=1e-4)
            if depth + 1 < num_modules:
                draft = heads.expand(
                    state, tokens[:, depth : depth + 1], torch.zeros(1, 1, dtype=torch.long), depth + 1
                )


def test_a_bfloat16_target_gets_bfloat16_heads(tmp_path: Path) -> None:
    case = Case(lambda: tiny_mixture("deepseek_v3").to(torch.bfloat16), name_as_deepseek)
    _, _, heads = load(case, tmp_path)
    assert heads.dtype == torch.bfloat16
    kept = [buffer.dtype for name, buffer in heads.named_buffers() if "e_score_correction_bias" in name]
    assert kept == [torch.float32]
    generate(heads.target, heads, random_prompt(7), max_new_tokens=6, do_sample=False)


class TestRefusals:
    """Refusals of a Qwen target's checkpoint with changed tensors, or with settings that it cannot have."""

    def make(self, path: Path, changes: Callable[[dict[str, Tensor]], Any], **overrides: Any) -> MTPHeads:
        model = tiny_target("qwen3", num_hidden_layers=2)
        tensors = name_as_qwen(random_modules(model, 1), 2)
        changes(tensors)
        write_checkpoint(model, tensors or {"model.other": torch.zeros(1)}, path)
        return MTPHeads.from_target_checkpoint(path, model, **overrides)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict.clear, r"holds no MTP module: neither model.layers.2.eh_proj.*train heads"),
            (
                lambda tensors: tensors.update({"mtp.layers.0.self_attn.sinks": tensors.pop(UP)}),
                r"blocks.0.layer.layer.mlp.up_proj.weight is missing\n.*sinks has no place",
            ),
            (
                lambda tensors: tensors.update({UP: tensors[UP].to(torch.float8_e4m3fn)}),
                r"the MTP tensors are quantized",
            ),
        ],
        ids=["no module", "missing and unexpected", "quantized"],
    )
    def test_tensors(self, changes: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=message):
            self.make(tmp_path, changes)

    def test_settings_that_the_checkpoint_decides(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="share_block cannot be set"):
            self.make(tmp_path, len, share_block=False)
        assert self.make(tmp_path, len, num_steps=5).num_unrolled_steps == 5
