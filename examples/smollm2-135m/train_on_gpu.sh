#!/usr/bin/env bash
# EAGLE-3 and MTP heads for SmolLM2 on one GPU: the target answers prompts, then heads learn from its replies, 60 million
# tokens each. In pieces of minutes: the same command goes on, also after a kill, until it says "done". What stands after
# it are options of `draftsmith train`.
#   PROMPTS=YOURS.jsonl.gz MINUTES=4 examples/smollm2-135m/train_on_gpu.sh
# Without a network, from a folder of wheels: pip install --no-index --find-links wheels datasets accelerate rich
set -euo pipefail
cd "$(dirname "$0")/../.."

MINUTES=${MINUTES:-4}                    # of this piece; its last 20 seconds are for saving
TARGET=${TARGET:-outputs/smollm2-135m}   # `make smollm2`
HEADS=${HEADS:-examples/heads/smollm2-135m-}  # where training starts; then comes the kind
PROMPTS=${PROMPTS:-}                     # docs/data.md; without any, the target writes both sides
CONVERSATIONS=${CONVERSATIONS:-20000}    # at most
BATCH=${BATCH:-1024}                     # conversations that are decoded together
STEPS=${STEPS:-1920}                     # of 32 rows of 1,024 tokens, for each kind
OUTPUT=${OUTPUT:-outputs/smollm2-gpu}    # replies.jsonl.gz, eagle3, mtp
PYTHON=${PYTHON:-python}

replies=(--max_new_tokens 512 --temperature 0.7)
# As the heads in examples/heads were trained, with 16 times the tokens in a step, and so 4 times the learning rate.
training=(
  --target_dtype bfloat16 --max_length 1024 --packing --per_device_train_batch_size 32 --gradient_accumulation_steps 1
  --muon_learning_rate 0.03 --learning_rate 4e-4 --validation_fraction 0.01 --max_eval_samples 16 --num_eval_prompts 8
  --eval_max_new_tokens 64 --save_steps 60 --eval_strategy no
)

export PYTHONPATH=$PWD/src HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}
end=$((SECONDS + 60 * MINUTES - 20))

run() { # a program, which is interrupted when the time is over: it saves what it has
  local left=$((end - SECONDS)) status=0
  if ((left > 0)); then
    timeout --foreground --signal=INT --kill-after=20 "$left" "$PYTHON" -m draftsmith "$@" || status=$?
    if ((status == 0 || SECONDS < end)); then return "$status"; fi
  fi
  echo "the time is over: the same command goes on"
  exit 124
}

if [ ! -f "$OUTPUT/replies.jsonl.gz.stats.json" ]; then # the last file that `draftsmith data` writes
  mkdir -p "$OUTPUT"
  source=(--mode self)
  if [ -n "$PROMPTS" ]; then source=(--prompts "$PROMPTS"); fi
  run data --target "$TARGET" "${source[@]}" --num_conversations "$CONVERSATIONS" --batch_size "$BATCH" \
    "${replies[@]}" --output "$OUTPUT/replies.jsonl.gz"
fi
for kind in eagle3 mtp; do
  if [ -f "$OUTPUT/$kind/training_record.json" ]; then continue; fi # the heads are there
  own=()
  if [ "$kind" = mtp ]; then own=(--loss_vocabulary draft); fi
  run train --target "$TARGET" --dataset "$OUTPUT/replies.jsonl.gz" --init_heads "$HEADS$kind" "${training[@]}" \
    "${own[@]}" --max_steps "$STEPS" --output_dir "$OUTPUT/$kind" --resume_from_checkpoint true "$@"
done
echo "done: $OUTPUT/eagle3 $OUTPUT/mtp"
