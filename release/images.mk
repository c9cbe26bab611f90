# Base images of both Dockerfiles. `make pins-images` adds their digests, or renews them: NAME:TAG@sha256:…
# Any other base needs Debian's or Ubuntu's packages, and Python from 3.11 on among them.
PYTHON_BASE := docker.io/library/python:3.11-slim
# With CUDA's compiler, headers and libraries.
CUDA_BASE := docker.io/nvidia/cuda:13.0.1-devel-ubuntu24.04
