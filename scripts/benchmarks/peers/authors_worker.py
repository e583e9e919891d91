"""Decodes prompts with the EAGLE or Medusa authors' own code, in an environment of its own.

    PYTHONPATH=CHECKOUT ENV/bin/python authors_worker.py JOB.json

The job: peer (eagle, github.com/SafeAILab/EAGLE, or medusa, github.com/FasterDecoding/Medusa), target and heads
(folders), max_new_tokens, temperature, dtype; for EAGLE also is_eagle3 and tree (total_token, depth, top_k). Medusa's
tree is the authors' default for unknown targets, and decoding is greedy.

The first JSON line on stdout has versions, and Medusa's tree. Then each JSON line on stdin is a prompt (token ids) and
a seed, and gets one line: the tokens after the prompt, and how many tokens each verify step appended (its tree's root
and the drafts accepted after it).
"""

import itertools
import json
import random
import sys

import torch
import transformers


def start_eagle(job):
    """What the first line has, and a function from a prompt to the text after each step."""
    from eagle.model.ea_model import EaModel

    model = EaModel.from_pretrained(
        use_eagle3=job["is_eagle3"],
        base_model_path=job["target"],
        ea_model_path=job["heads"],
        torch_dtype=getattr(torch, job["dtype"]),
        **job["tree"],
    ).eval()
    options = {"temperature": job["temperature"], "max_new_tokens": job["max_new_tokens"]}
    return {}, lambda prompt: [prompt, *model.ea_generate(prompt, **options)]


def start_medusa(job):
    from medusa.model import medusa_model

    model = medusa_model.MedusaModel.from_pretrained(job["heads"], torch_dtype=getattr(torch, job["dtype"])).eval()
    texts = []
    update = medusa_model.update_inference_inputs

    def keep_text(*args):  # their generator yields the text as words only
        updated = update(*args)
        texts.append(updated[0])
        return updated

    def decode(prompt):
        texts[:] = [prompt]
        for _ in model.medusa_generate(prompt, medusa_choices=medusa_model.mc_sim_7b_63):
            if texts[-1].shape[1] - prompt.shape[1] > job["max_new_tokens"]:
                break
        return texts

    medusa_model.update_inference_inputs = keep_text
    return {"tree": medusa_model.mc_sim_7b_63}, decode


@torch.no_grad()
def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    torch.set_num_threads(1)
    header, decode = {"eagle": start_eagle, "medusa": start_medusa}[job["peer"]](job)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, **header}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = torch.tensor([asked["prompt"]])
        torch.manual_seed(asked["seed"])
        random.seed(asked["seed"])  # EAGLE's acceptance draws from it, its bonus tokens from torch's
        texts = decode(prompt)
        lengths = [after.shape[1] - before.shape[1] for before, after in itertools.pairwise(texts)]
        tokens = texts[-1][0, prompt.shape[1] :].tolist()
        print(json.dumps({"tokens": tokens, "lengths": lengths}), flush=True)


main()
