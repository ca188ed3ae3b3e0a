# The lab on NVIDIA's PyTorch container, whose torch, CUDA and NCCL stay as they are: pyproject.toml has ranges, not pins.
# Not tested: this was written on a machine with neither Docker nor a GPU.
#
#   docker build -t megatron-lab .
#   docker run --rm --gpus all --ipc=host -p 127.0.0.1:8888:8888 megatron-lab
#
# --ipc=host: ranks and NCCL share memory through /dev/shm, and a container gets only 64 MB of it by default.
ARG BASE=nvcr.io/nvidia/pytorch:25.09-py3
FROM ${BASE}

WORKDIR /workspace/megatron-lab
COPY . .
# The container pins its own packages in PIP_CONSTRAINT, which may hold back packages that the lab needs newer.
RUN PIP_CONSTRAINT= pip install --no-cache-dir -e '.[lab]' \
    && python -c "import torch; assert torch.version.cuda, 'pip has replaced the torch of the container'"

EXPOSE 8888
CMD ["python", "-m", "course.open", "--ip=0.0.0.0"]
