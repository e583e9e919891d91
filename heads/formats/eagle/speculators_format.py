"""EAGLE-3 and P-EAGLE in the speculators format, which vLLM serves as it is.

The layer's config stands in `transformer_layer_config`. speculators loads a checkpoint without that config's
`model_type` or `num_hidden_layers` silently wrong, and every flag has another default elsewhere, so all of them must be
there and all of them are written.
"""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from draftsmith.heads.config import name_of_target
from draftsmith.heads.formats.eagle.eagle3 import FLAGS, IDS, Eagle3, own_settings
from draftsmith.heads.formats.eagle.engines import engine_limits, write_masks
from draftsmith.heads.formats.eagle.llama_keys import name_dtype, refuse_unwritable, write_decoder
from draftsmith.heads.formats.format import Exported, Imported
from draftsmith.heads.formats.published import OWN_KEY, Published, refuse
from draftsmith.heads.formats.tensors import take_copies, target_table
from draftsmith.inference.targets.target import Target

# The release whose code was read; speculators notes its own here.
_VERSION = "0.9.0"
_ALGORITHMS = ("eagle3", "peagle")
_LAYER_TYPES = ("llama", "qwen3")


class Speculators(Eagle3):
    name = "speculators"
    title = "heads in the speculators format"
    kinds: ClassVar[tuple[str, ...]] = ("eagle3", "parallel")

    def matches(self, published: Published) -> bool:
        return "speculators_model_type" in published.config

    def read(self, published: Published, target: Target) -> Imported:
        path, algorithm = published.path, published.config["speculators_model_type"]
        layer = published.config.get("transformer_layer_config")
        if algorithm not in _ALGORITHMS:
            refuse(path, f"speculators_model_type is {algorithm!r}; this reader knows {', '.join(_ALGORITHMS)}")
        if not isinstance(layer, dict):
            refuse(path, "config.json has no transformer_layer_config")
        if layer.get("model_type") not in _LAYER_TYPES:
            refuse(
                path,
                f"model_type of transformer_layer_config is {layer.get('model_type')!r}; allowed are "
                f"{', '.join(_LAYER_TYPES)}",
            )
        if "norm_before_residual" not in published.config:
            refuse(path, "config.json has no norm_before_residual, whose default differs between releases")
        return super().read(replace(published, tensors=without_verifier(published, target)), target)

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        refuse_unwritable(self.title, *engine_limits(config, "vLLM"))
        token, named = write_masks(config, tensors, target)
        named.setdefault("embed_tokens.weight", target_table(target).to(named["fc.weight"].dtype))
        if token is None:
            algorithm, cls, depths = "eagle3", "Eagle3DraftModel", config.ttt_steps
        else:
            algorithm, cls, depths = "peagle", "PEagleDraftModel", config.num_depths
        keys = {
            **speculators_keys(config, target, algorithm, depths),
            "architectures": [cls],
            "draft_vocab_size": config.vocab_size,
            **{flag: getattr(config, flag, False) for flag in FLAGS},
            "embed_requires_grad": config.own_embedding,
            IDS: config.feature_layers,
            "transformer_layer_config": {
                **write_decoder(config, config.num_layers),
                "attention_bias": config.qkv_bias,
                "mlp_bias": False,
                "torch_dtype": name_dtype(tensors),
            },
            "torch_dtype": name_dtype(tensors),
            OWN_KEY: own_settings(config),
        }
        if token is not None:
            keys["mask_token_id"] = token
        return Exported(keys, named, "model.safetensors", ("vllm serve {heads}",))


def speculators_keys(config: Any, target: Target, algorithm: str, num_proposed: int) -> dict[str, Any]:
    """The keys that all speculators configs have. num_proposed: tokens that an engine drafts in a step."""
    method = {"proposal_type": "greedy", "speculative_tokens": num_proposed, "verifier_accept_k": 1}
    return {
        "speculators_model_type": algorithm,
        "speculators_version": _VERSION,
        "target_hidden_size": target.hidden_size,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "accept_tolerance": 0.0}],
            "verifier": {
                "name_or_path": name_of_target(target) or config.target_name_or_path,
                "architectures": [type(target.model).__name__],
            },
        },
    }


def without_verifier(published: Published, target: Target) -> dict[str, Tensor]:
    """The tensors without speculators' frozen copies of the target's norm and LM head. The copy of the LM head has the
    draft vocabulary's rows only, where that is reduced."""
    tensors, lm_head = dict(published), target.lm_head_weight().detach().cpu()
    t2d, copy = tensors.get("t2d"), tensors.get("verifier_lm_head.weight")
    if t2d is not None and copy is not None and t2d.shape == (len(lm_head),) and copy.shape != lm_head.shape:
        lm_head = lm_head[t2d.bool()]
    own = {"verifier_lm_head.weight": lm_head}
    if (gain := target.final_norm_gain()) is not None:
        own["verifier_norm.weight"] = gain
    take_copies(published.path, tensors, own)
    return tensors
