# vLLM's own image, with slidesparse in it.
#
#     docker build -t slidesparse .
#     docker run --gpus all --ipc=host -p 8000:8000 -v "$PWD/Qwen2.5-7B-6of8:/model" slidesparse /model
#
# CI has no docker: it runs the RUN steps in an environment with vLLM's Python (docker/check.sh), and never built the image.
# VLLM is the newest release that ran on a GPU; docs/serving.md names those that are tested.
ARG VLLM=0.33.0
FROM vllm/vllm-openai:v${VLLM}
COPY . /slidesparse
WORKDIR /slidesparse
RUN bash docker/install.sh
WORKDIR /
ENTRYPOINT ["vllm", "serve"]
