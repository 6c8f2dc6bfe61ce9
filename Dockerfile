# lit_fed for CPUs, as a user without rights: `docker build --tag lit_fed .`, then `docker run lit_fed fit --help`.
FROM python:3.13-slim AS build
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.13-slim
# URL of a further package index, for builds of PyTorch without CUDA; empty for pip's own
ARG EXTRA_INDEX=""
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt ${EXTRA_INDEX:+--extra-index-url "$EXTRA_INDEX"} /wheels/*.whl \
 && useradd --create-home --uid 1000 lit_fed
USER lit_fed
WORKDIR /home/lit_fed
# with STATUS_PORT, /healthz of `lit-fed federate --status_port`; other commands are healthy while they run
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s CMD ["python", "-c", "import os, urllib.request as web; port = os.environ.get('STATUS_PORT'); port and web.urlopen(f'http://127.0.0.1:{port}/healthz', timeout=8)"]
ENTRYPOINT ["lit-fed"]
CMD ["--help"]
