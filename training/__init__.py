"""Training draft heads on a frozen target: `accelerate launch training/train_heads.py --config FILE.yaml`.

Rooms, each of which imports earlier ones only: losses, data -> features -> synthesis -> distributed -> options ->
reporting -> run -> train_heads.
"""
