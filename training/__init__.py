"""Training draft heads on a frozen target: `accelerate launch training/train_heads.py --config FILE.yaml`."""
