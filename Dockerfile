# The image of the operator and the watcher: no torch, no cloud SDK, not root. `make images` builds it, on the base in
# release/images.mk.
ARG BASE=docker.io/library/python:3.11-slim
# hadolint ignore=DL3006
FROM ${BASE} AS build
WORKDIR /src
COPY requirements requirements
# Build tools are in a folder of their own, so that the image doesn't hold them.
RUN python3 -m venv /opt/spottrain \
    && /opt/spottrain/bin/pip install --no-cache-dir --require-hashes --target /opt/build \
        --requirement requirements/build.txt \
    && /opt/spottrain/bin/pip install --no-cache-dir --no-deps --require-hashes \
        --requirement requirements/operator.txt
# The wheel holds the packages that are copied here. It installs the script `spottrain` without its package, so the
# script is removed.
COPY pyproject.toml README.md LICENSE ./
COPY runtime/spottrain_runtime runtime/spottrain_runtime
COPY api/spottrain_api api/spottrain_api
COPY operator/spottrain_operator operator/spottrain_operator
COPY operator/spottrain_watcher operator/spottrain_watcher
RUN PYTHONPATH=/opt/build /opt/spottrain/bin/pip install --no-cache-dir --no-deps --no-build-isolation ".[operator]" \
    && rm /opt/spottrain/bin/spottrain \
    && /opt/spottrain/bin/pip check

# hadolint ignore=DL3006
FROM ${BASE}
COPY --from=build /opt/spottrain /opt/spottrain
ENV PATH=/opt/spottrain/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /
CMD ["python", "-m", "spottrain_operator"]
