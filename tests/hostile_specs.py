"""What a user may write into a spec beside the pod template.

Some of it is refused, and some is shown to others.
"""

from __future__ import annotations

from typing import Any

MEGABYTE = "x" * 1_000_000
LONG = "Too long: may not be more than"
PATTERN = "should match"

URI, ENTRYPOINT = "s3://bucket/run", {"script": "train.py"}


def uri(text: str, **more: Any) -> dict[str, Any]:
    return {"checkpoint": {"uri": text, **more}}


def script(**parts: Any) -> dict[str, Any]:
    return {"entrypoint": parts}


def pool(**parts: Any) -> dict[str, Any]:
    one = {"name": "a", "capacityType": "spot", "provider": "custom", "nodeSelector": {"a": "b"}}
    return {"capacity": {"pools": [one | parts]}}


def of_secret(**parts: Any) -> dict[str, Any]:
    return {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "k"} | parts}}]}


# What a user may try, and how the API server refuses it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "line-break-in-the-uri": (uri(f"{URI}\nCRITICAL: all is lost"), PATTERN),
    "carriage-return-in-the-uri": (uri(f"{URI}\rs3://bucket/good"), PATTERN),
    "terminal-escape-in-the-uri": (uri(f"{URI}\x1b[2J"), PATTERN),
    "delete-in-the-uri": (uri(f"{URI}\x7f"), PATTERN),
    "nothing-to-see-in-the-uri": (uri(f"{URI}\u200b"), PATTERN),
    "turned-around-uri": (uri(f"{URI}\u202egnp.exe"), PATTERN),
    "line-separator-in-the-uri": (uri(f"{URI}\u2028"), PATTERN),
    "uri-of-a-megabyte": (uri(f"{URI}{MEGABYTE}"), LONG),
    "uri-of-a-metadata-server": (uri("http://169.254.169.254/latest/meta-data"), "checkpoint.uri: unknown scheme"),
    "relative-file": (uri("file://etc/passwd"), "checkpoint.uri: unknown scheme"),
    "endpoint-of-no-kind": (uri(URI, endpointURL="file:///etc/passwd"), "checkpoint.endpointURL: not an HTTP"),
    "line-break-in-the-endpoint": (uri(URI, endpointURL="http://a\nHost: b"), PATTERN),
    "endpoint-of-a-megabyte": (uri(URI, endpointURL=f"http://{MEGABYTE}"), LONG),
    "line-break-in-the-script": (script(script="train.py\nrm"), PATTERN),
    "nul-in-the-script": (script(script="train.py\x00.sh"), PATTERN),
    "script-of-a-megabyte": (script(script=MEGABYTE), LONG),
    "module-of-a-megabyte": (script(module=MEGABYTE), LONG),
    "folder-of-a-megabyte": (script(script="a", workingDir=MEGABYTE), LONG),
    "argument-of-a-megabyte": (script(script="a", args=[MEGABYTE]), LONG),
    "arguments-without-end": (script(script="a", args=["a"] * 1025), "must have at most 1024 items"),
    "line-break-in-the-image": ({"image": "trainer\nevil"}, PATTERN),
    "image-of-a-megabyte": ({"image": MEGABYTE}, LONG),
    "no-image": ({"image": ""}, "image is missing; name the container image"),
    "terminal-escape-in-a-pool": (pool(name="\x1b]0;mine\x07"), PATTERN),
    "pool-of-a-megabyte": (pool(name=MEGABYTE), LONG),
    "selector-of-a-megabyte": (pool(nodeSelector={"a": MEGABYTE}), LONG),
    "currency-of-a-megabyte": ({"capacity": {"currency": "E" * 1_000_000}}, LONG),
    "secret-of-another-namespace": (of_secret(name="kube-system/admin"), PATTERN),
    "secret-above": (of_secret(name="../admin"), PATTERN),
    "two-secrets-in-a-name": (of_secret(name="mine,theirs"), PATTERN),
    "secret-of-a-megabyte": (of_secret(name=MEGABYTE), LONG),
    "key-of-a-megabyte": (of_secret(key=MEGABYTE), LONG),
    "account-of-another-namespace": ({"podTemplate": {"serviceAccountName": "kube-system:default"}}, PATTERN),
    "account-in-cyrillic": ({"podTemplate": {"serviceAccountName": "d\u0435fault"}}, PATTERN),
    "pull-secret-of-another-namespace": ({"podTemplate": {"imagePullSecrets": [{"name": "../admin"}]}}, PATTERN),
    "class-of-a-megabyte": ({"podTemplate": {"priorityClassName": "a" * 1_000_000}}, LONG),
    "toleration-of-a-megabyte": ({"podTemplate": {"tolerations": [{"key": MEGABYTE}]}}, LONG),
    "nodes-without-end": ({"nodes": {"max": 10**9}}, "nodes.max is above 512"),
    "batch-below-zero": ({"batch": {"global": -8}}, "should be greater than or equal to"),
    "a-field-of-nobody": ({"hostNetwork": True}, 'unknown field "spec.hostNetwork"'),
}

# What is accepted, because it does no harm wherever it is shown.
HTML = "<script>alert(1)</script>"
SHOWN: dict[str, str] = {
    "HTML": HTML,
    "an attribute": "\" onload=alert(1) x='",
    "a template": "{{7*7}}{% raw %}${7*7}",
    "a shell": "'; rm -rf / #$(reboot)`reboot`",
    "YAML": "a: [!!python/object/apply:os.system {b]",
    "a metric": 'b"} 1 spottrain_leader{c="d',
    "a format": "%s%n{0.__class__}",
    "rich's markup": "[bold red]lost[/]",
    "half an address": "[::1",
    "confusable letters": "ch\u0435ckp\u043eint",
    "a long text": "y" * 200,
}
