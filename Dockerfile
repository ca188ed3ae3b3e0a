# The lab on NVIDIA's PyTorch container, whose torch, CUDA and NCCL stay as they are: pyproject.toml has ranges, not pins.
# Not tested: this was written on a machine with neither Docker nor a GPU. Name a tag whose PyTorch is 2.11 or newer;
# the one of 25.12 is 2.10, by NVIDIA's release notes.
#
#   docker build --build-arg BASE=nvcr.io/nvidia/pytorch:<tag> -t megatron-lab .
#   docker run --rm --gpus all --ipc=host -p 127.0.0.1:8888:8888 megatron-lab
#
# --ipc=host: ranks and NCCL share memory through /dev/shm, and a container gets only 64 MB of it by default.
ARG BASE
FROM ${BASE}

WORKDIR /workspace/megatron-lab
COPY . .
# The container pins its own packages in PIP_CONSTRAINT, which may hold back packages that the lab needs newer.
# pip would replace a torch that is too old.
RUN before=$(python -c "import torch; print(torch.__version__)") \
    && PIP_CONSTRAINT= pip install --no-cache-dir -e '.[lab]' \
    && python -c "import sys, torch; assert torch.__version__ == sys.argv[1], sys.argv[1] + ' was replaced'" "$before"

EXPOSE 8888
CMD ["python", "-m", "course.open", "--ip=0.0.0.0"]
