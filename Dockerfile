# syntax=docker/dockerfile:1
# mmrt with its demo model; docs/containers.md says how to run it.
#   CPU:        docker build -t mmrt .
#   NVIDIA GPU: docker build -t mmrt:cuda --build-arg VARIANT=cuda .    (the host needs NVIDIA's container toolkit)
ARG PYTHON=3.13

FROM python:${PYTHON}-slim-trixie AS build
ARG VARIANT=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY . .
RUN python -m venv /opt/mmrt \
    && case "$VARIANT" in \
        cpu) /opt/mmrt/bin/pip install --index-url https://download.pytorch.org/whl/cpu --no-deps torch==2.13.0 \
            && /opt/mmrt/bin/pip install '.[otel]' ;; \
        cuda) /opt/mmrt/bin/pip install '.[cuda,otel]' ;; \
        *) echo "VARIANT is $VARIANT, allowed are cpu and cuda" >&2; exit 1 ;; \
    esac

FROM python:${PYTHON}-slim-trixie
ARG VARIANT=cpu
# tini collects processes that outlive their parents. Triton compiles the launchers of its kernels with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && if [ "$VARIANT" = cuda ]; then apt-get install -y --no-install-recommends gcc libc6-dev; fi \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 mmrt \
    && install -d -o mmrt -g mmrt /models /home/mmrt/.local/state/mmrt \
        /home/mmrt/.cache /home/mmrt/.cache/huggingface
COPY --from=build /opt/mmrt /opt/mmrt
ENV PATH=/opt/mmrt/bin:$PATH HOME=/home/mmrt PYTHONUNBUFFERED=1
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
USER 10001:10001
WORKDIR /home/mmrt
VOLUME ["/models", "/home/mmrt/.local/state/mmrt", "/home/mmrt/.cache/huggingface"]
EXPOSE 8000
# A run that does without a part is ready all the same; one that is starting has two minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as http; http.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["tini", "--", "mmrt"]
CMD ["up", "--host", "0.0.0.0"]
