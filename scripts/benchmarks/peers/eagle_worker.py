"""Decodes prompts with the EAGLE authors' own code (github.com/SafeAILab/EAGLE), in an environment of its own.

    PYTHONPATH=CHECKOUT ENV/bin/python eagle_worker.py JOB.json

The job: target and heads (folders), is_eagle3, tree (total_token, depth, top_k), prompts (token ids), max_new_tokens,
temperature, seed. The first JSON line on stdout has versions. Then there is one line for each prompt: its tokens after
the prompt, and how many tokens each verify step appended, its tree's root and the drafts accepted after it.
"""

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
        torch_dtype=torch.float32,
        **job["tree"],
    ).eval()
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}))
    for number, prompt in enumerate(job["prompts"]):
        torch.manual_seed(job["seed"] + number)
        random.seed(job["seed"] + number)  # their acceptance draws from it, their bonus tokens from torch's
        steps = model.ea_generate(
            torch.tensor([prompt]), temperature=job["temperature"], max_new_tokens=job["max_new_tokens"]
        )
        lengths, text = [], prompt
        for ids in steps:
            lengths.append(ids.shape[1] - len(text))
            text = ids[0].tolist()
        print(json.dumps({"tokens": text[len(prompt) :], "lengths": lengths}), flush=True)


main()
