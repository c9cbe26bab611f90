# The image of the operator and the watcher: no torch, no cloud SDK, not root.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY operator operator
COPY trainer-image trainer-image
COPY local-cluster/spottrain_local local-cluster/spottrain_local
RUN python -m venv /opt/spottrain \
    && /opt/spottrain/bin/pip install --no-cache-dir --upgrade "pip>=24" \
    && /opt/spottrain/bin/pip install --no-cache-dir --constraint constraints.txt ".[operator]"

FROM python:3.11-slim
COPY --from=build /opt/spottrain /opt/spottrain
ENV PATH=/opt/spottrain/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /
CMD ["python", "-m", "spottrain_operator"]
