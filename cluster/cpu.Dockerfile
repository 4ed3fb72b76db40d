# A rehearsal of any config on a machine without a GPU:
#
#   docker build -f cluster/cpu.Dockerfile -t accelerate-recipes:cpu .
#   docker run --rm --shm-size 8g -v "$PWD/runs:/srv/recipes/runs" accelerate-recipes:cpu fsdp_fp8 vit --max_steps 20
FROM python:3.11-slim-bookworm

# gcc: torch.compile and DeepSpeed's operators. git: a run's record names the commit.
# hadolint ignore=DL3008 # versions are those of the base image's release
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/recipes
COPY requirements.txt pyproject.toml launch.sh ./
RUN ./launch.sh setup --extra trackers --extra onnx && rm -rf /root/.cache

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
