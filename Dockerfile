# vitascope's server, on a CPU:
#
#     docker build -t vitascope .
#     docker run --rm -p 8000:8000 -v "$PWD/runs/photos:/model:ro" -e VITASCOPE_TOKEN=... vitascope
#
# Where a CPU build of torch lies in an index of its own, name that: --build-arg EXTRA_INDEX=URL. Otherwise pip
# takes the ordinary torch, with what it needs for GPUs. Exported files need an extra: --build-arg EXTRAS=server,onnx.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
ARG EXTRA_INDEX=
ARG EXTRAS=server
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN python -m venv /venv \
    && PIP_EXTRA_INDEX_URL="${EXTRA_INDEX}" /venv/bin/pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"

FROM python:${PYTHON}-slim
# libgomp1: OpenMP, which torch and scikit-learn compute with
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 vitascope
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
USER vitascope
WORKDIR /home/vitascope
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/livez', timeout=2)"]
ENTRYPOINT ["vitascope", "serve"]
CMD ["/model", "--host", "0.0.0.0"]
