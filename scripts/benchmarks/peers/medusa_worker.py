"""Decodes prompts with the Medusa authors' own code (github.com/FasterDecoding/Medusa), in an environment of its own.

    PYTHONPATH=CHECKOUT ENV/bin/python medusa_worker.py JOB.json

The job: heads (a folder, whose config names the target), max_new_tokens, dtype. Decoding is greedy. The first JSON line
on stdout has versions and the tree, the authors' default for unknown targets. Then each JSON line on stdin is a prompt
(token ids), and gets one line: the tokens after the prompt, and how many tokens each verify step appended (its tree's
root and the drafts accepted after it).
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
    dtype = getattr(torch, job["dtype"])
    model = medusa_model.MedusaModel.from_pretrained(job["heads"], torch_dtype=dtype).eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**versions, "tree": medusa_model.mc_sim_7b_63}), flush=True)
    texts = []
    update = medusa_model.update_inference_inputs

    def keep_text(*args):  # their generator yields the text as words only
        updated = update(*args)
        texts.append(updated[0])
        return updated

    medusa_model.update_inference_inputs = keep_text
    for line in sys.stdin:
        prompt = torch.tensor([json.loads(line)["prompt"]])
        texts[:] = [prompt]
        for _ in model.medusa_generate(prompt, medusa_choices=medusa_model.mc_sim_7b_63):
            if texts[-1].shape[1] - prompt.shape[1] > job["max_new_tokens"]:
                break
        lengths = [after.shape[1] - before.shape[1] for before, after in itertools.pairwise(texts)]
        tokens = texts[-1][0, prompt.shape[1] :].tolist()
        print(json.dumps({"tokens": tokens, "lengths": lengths}), flush=True)


main()
