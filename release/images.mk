# Base images of both Dockerfiles, with the digests of all their platforms. `make pins-images` renews them.
# Any other base needs Debian's or Ubuntu's packages, and Python from 3.11 on among them.
PYTHON_BASE := docker.io/library/python:3.11.16-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7
# With CUDA's compiler, headers and libraries, of the CUDA that torch is built for.
CUDA_BASE := docker.io/nvidia/cuda:13.2.1-devel-ubuntu24.04@sha256:44a9504c6dfb50b1241464241b02a93871928f373de6f5a644cf5fe9f080aa63
