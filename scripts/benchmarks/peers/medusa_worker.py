"""Decodes prompts with the Medusa authors' own code (github.com/FasterDecoding/Medusa), in an environment of its own.

    PYTHONPATH=CHECKOUT ENV/bin/python medusa_worker.py JOB.json

The job: heads (a folder, whose config names the target), prompts (token ids), max_new_tokens. Decoding is greedy. The
first JSON line on stdout has versions and the tree, the authors' default for unknown targets. Then there is one line
for each prompt: its tokens after the prompt, and how many tokens each verify step appended, its tree's root and the
drafts accepted after it.
"""

import itertools
import json
import sys

import torch
import transformers
from medusa.model import medusa_model


@torch.no_grad()
def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    torch.set_num_threads(1)
    model = medusa_model.MedusaModel.from_pretrained(job["heads"], torch_dtype=torch.float32).eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**versions, "tree": medusa_model.mc_sim_7b_63}))
    texts = []
    update = medusa_model.update_inference_inputs

    def keep_text(*args):  # their generator yields the text as words only
        updated = update(*args)
        texts.append(updated[0][0].tolist())
        return updated

    medusa_model.update_inference_inputs = keep_text
    for prompt in job["prompts"]:
        texts[:] = [prompt]
        for _ in model.medusa_generate(torch.tensor([prompt]), medusa_choices=medusa_model.mc_sim_7b_63):
            if len(texts[-1]) - len(prompt) > job["max_new_tokens"]:
                break
        lengths = [len(after) - len(before) for before, after in itertools.pairwise(texts)]
        print(json.dumps({"tokens": texts[-1][len(prompt) :], "lengths": lengths}), flush=True)


main()
