# The image of the operator and the watcher: no torch, no cloud SDK, not root. The wheel holds the packages that are
# copied here. It installs the script `spottrain` without its package, so the script is removed.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY api/spottrain_api api/spottrain_api
COPY operator/spottrain_operator operator/spottrain_operator
COPY operator/spottrain_watcher operator/spottrain_watcher
RUN python -m venv /opt/spottrain \
    && /opt/spottrain/bin/pip install --no-cache-dir --upgrade "pip>=24" \
    && /opt/spottrain/bin/pip install --no-cache-dir --constraint constraints.txt ".[operator]" \
    && rm /opt/spottrain/bin/spottrain

FROM python:3.11-slim
COPY --from=build /opt/spottrain /opt/spottrain
ENV PATH=/opt/spottrain/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /
CMD ["python", "-m", "spottrain_operator"]
