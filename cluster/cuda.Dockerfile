# Training on NVIDIA GPUs, with TransformerEngine built for the pinned torch:
#
#   docker build -f cluster/cuda.Dockerfile -t accelerate-recipes:cuda .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/srv/recipes/runs" accelerate-recipes:cuda ddp_fp8_te vit
#
# cluster/trainjob.yaml runs this image on several machines. CUDA's major and minor version are those of the pinned
# torch (requirements.txt): TransformerEngine is compiled against both.
FROM nvidia/cuda:13.2.0-cudnn-devel-ubuntu24.04

# Ubuntu 24.04 has Python 3.12. git: a run's record names the commit.
# hadolint ignore=DL3008 # versions are those of the base image's release
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc g++ git ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/recipes
COPY requirements.txt pyproject.toml launch.sh ./
RUN ./launch.sh setup --extra trackers --extra gpu --extra deepspeed

# Compiled for Hopper and Blackwell, by four compilers at once: each needs some GB of memory.
ARG NVTE_CUDA_ARCHS="90;100"
ARG MAX_JOBS=4
RUN NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS="$NVTE_CUDA_ARCHS" MAX_JOBS="$MAX_JOBS" \
    ./launch.sh setup --extra trackers --extra gpu --extra deepspeed --extra te \
    && rm -rf /root/.cache

COPY LICENSE README.md ./
COPY accelerate_configs accelerate_configs/
COPY amp8 amp8/
COPY cluster cluster/
COPY faithful faithful/
COPY recipes recipes/
COPY shared shared/
COPY tools tools/

STOPSIGNAL SIGTERM
ENTRYPOINT ["./launch.sh"]
CMD ["ls"]
