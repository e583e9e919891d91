"""`vllm bench serve`, in vLLM's own environment: the build for CPUs has no `vllm` command.

python vllm_bench.py OPTION ...
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
