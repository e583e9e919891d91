"""Decodes prompts with the EAGLE authors' own code (github.com/SafeAILab/EAGLE), in an environment of its own.

    PYTHONPATH=CHECKOUT ENV/bin/python eagle_worker.py JOB.json

The job: target and heads (folders), is_eagle3, tree (total_token, depth, top_k), max_new_tokens, temperature, dtype.
The first JSON line on stdout has versions. Then each JSON line on stdin is a prompt (token ids) and a seed, and gets
one line: the tokens after the prompt, and how many tokens each verify step appended (its tree's root and the drafts
accepted after it).
"""

import itertools
import json
import random
import sys

import torch
import transformers
from eagle.model.ea_model import EaModel


@torch.no_grad()
def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    torch.set_num_threads(1)
    model = EaModel.from_pretrained(
        use_eagle3=job["is_eagle3"],
        base_model_path=job["target"],
        ea_model_path=job["heads"],
        torch_dtype=getattr(torch, job["dtype"]),
        **job["tree"],
    ).eval()
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        torch.manual_seed(asked["seed"])
        random.seed(asked["seed"])  # their acceptance draws from it, their bonus tokens from torch's
        prompt = torch.tensor([asked["prompt"]])
        steps = model.ea_generate(prompt, temperature=job["temperature"], max_new_tokens=job["max_new_tokens"])
        texts = [prompt, *steps]
        lengths = [after.shape[1] - before.shape[1] for before, after in itertools.pairwise(texts)]
        tokens = texts[-1][0, prompt.shape[1] :].tolist()
        print(json.dumps({"tokens": tokens, "lengths": lengths}), flush=True)


main()
