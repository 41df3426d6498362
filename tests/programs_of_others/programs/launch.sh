#!/usr/bin/env bash
# A launcher as clusters have them: variables, a check of the GPU, the program of a folder of its own.
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
python -c 'import torch; assert torch.cuda.is_available(), "no GPU"; print(torch.cuda.get_device_name(0))'
exec python "${PROGRAM:-gpt_loop.py}" "${PRECISION:-bf16}"
