"""A Google Cloud Storage in memory, ``python gcs_fake_program.py PORT``: the part of the JSON API for objects.

It enforces the preconditions on generations, verifies ``crc32c`` and ``md5Hash`` before it stores an upload, and
pages its listings. It has no credentials, versions, buckets with rules, or batches, and refuses unknown requests.
One thread serves all requests and never waits between a check of an object and its change, so each request is atomic.

API: https://cloud.google.com/storage/docs/json_api/v1
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.message import Message
from email.utils import format_datetime
from typing import Any

import google_crc32c
from aiohttp import web

PAGE = 1_000
BYTES = "application/octet-stream"
# More than any object of these tests.
MOST_BYTES = 1 << 32

# The fake refuses other parameters, because an ignored parameter could be a precondition.
PARAMETERS = {
    *("alt", "fields", "prettyPrint", "project", "projection", "userProject"),
    *("uploadType", "upload_id", "name"),
    *("generation", "sourceGeneration", "ifGenerationMatch", "ifSourceGenerationMatch"),
    *("prefix", "delimiter", "maxResults", "pageToken", "startOffset", "endOffset"),
    *("predefinedAcl", "predefinedDefaultObjectAcl", "destinationPredefinedAcl", "enableObjectRetention"),
}


@dataclass(frozen=True)
class Stored:
    """One generation of an object."""

    content: bytes
    resource: dict[str, Any]


@dataclass
class Session:
    """A resumable upload that is under way."""

    bucket: str
    resource: dict[str, Any]
    condition: str | None
    content: bytearray = field(default_factory=bytearray)


class RefusedError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


class Storage:
    """All objects, and the operations that change them."""

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, Stored]] = {}
        self._generations = itertools.count(time.time_ns() // 1_000)

    def bucket(self, name: str) -> dict[str, Stored]:
        if name not in self.buckets:
            raise RefusedError(404, "The specified bucket does not exist.")
        return self.buckets[name]

    def find(self, bucket: str, name: str, wanted: str | None, condition: str | None) -> Stored:
        """Return the object. Refuse another generation with 404, or with 412 if the generation is a condition."""
        stored = self.bucket(bucket).get(name)
        if stored is None or wanted not in (None, stored.resource["generation"]):
            raise RefusedError(404, f"No such object: {bucket}/{name}")
        check(condition, stored)
        return stored

    def store(self, bucket: str, resource: dict[str, Any], content: bytes, condition: str | None) -> dict[str, Any]:
        """Store a new generation of the object that ``resource`` names, and return its resource."""
        objects = self.bucket(bucket)
        name = resource.get("name")
        if not name:
            raise RefusedError(400, "Required parameter: name")
        hashes = {
            "crc32c": base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode(),
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
        }
        for kind, right in hashes.items():
            if resource.get(kind, right) != right:
                raise RefusedError(400, f"Provided {kind} {resource[kind]!r} doesn't match calculated {right!r}.")
        check(condition, objects.get(name))
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        generation = str(next(self._generations))
        made = {
            "contentType": BYTES,
            **resource,
            **hashes,
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{generation}",
            "bucket": bucket,
            "generation": generation,
            "metageneration": "1",
            "etag": generation,
            "size": str(len(content)),
            "timeCreated": now,
            "updated": now,
            "storageClass": "STANDARD",
        }
        objects[name] = Stored(content, made)
        return made


def check(wanted: str | None, stored: Stored | None) -> None:
    """Check a precondition against an object, or against its absence. Refuse with 412 if it fails."""
    if wanted not in (None, stored.resource["generation"] if stored else "0"):
        raise RefusedError(412, "At least one of the pre-conditions you specified did not hold.")


storage = Storage()
sessions: dict[str, Session] = {}
routes = web.RouteTableDef()

BUCKET = "/storage/v1/b/{bucket}"
OBJECT = BUCKET + "/o/{name}"


@routes.get("/storage/v1/b")
async def list_buckets(_request: web.Request) -> web.Response:
    items = [bucket_resource(name) for name in sorted(storage.buckets)]
    return web.json_response({"kind": "storage#buckets", "items": items})


@routes.post("/storage/v1/b")
async def make_bucket(request: web.Request) -> web.Response:
    name = (await request.json())["name"]
    if name in storage.buckets:
        raise RefusedError(409, "Your previous request to create the named bucket succeeded and you already own it.")
    storage.buckets[name] = {}
    return web.json_response(bucket_resource(name))


@routes.get(BUCKET)
async def get_bucket(request: web.Request) -> web.Response:
    storage.bucket(request.match_info["bucket"])
    return web.json_response(bucket_resource(request.match_info["bucket"]))


@routes.delete(BUCKET)
async def delete_bucket(request: web.Request) -> web.Response:
    if storage.bucket(request.match_info["bucket"]):
        raise RefusedError(409, "The bucket you tried to delete is not empty.")
    del storage.buckets[request.match_info["bucket"]]
    return web.Response(status=204)


@routes.get(BUCKET + "/o")
async def list_objects(request: web.Request) -> web.Response:
    asked = request.query
    prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
    most = min(int(asked.get("maxResults", PAGE)), PAGE)
    last = base64.urlsafe_b64decode(asked.get("pageToken", "")).decode()
    first, end = asked.get("startOffset", ""), asked.get("endOffset")
    items: list[dict[str, Any]] = []
    prefixes: list[str] = []
    answer = {"kind": "storage#objects", "items": items, "prefixes": prefixes}
    for name, stored in sorted(storage.bucket(request.match_info["bucket"]).items()):
        if not name.startswith(prefix) or name < first or (end is not None and name >= end):
            continue
        head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        entry = prefix + head + found if found else name
        # Names under one prefix are adjacent, and count once.
        if entry <= last:
            continue
        if len(items) + len(prefixes) == most:
            answer["nextPageToken"] = base64.urlsafe_b64encode(last.encode()).decode()
            break
        last = entry
        if found:
            prefixes.append(entry)
        else:
            items.append(stored.resource)
    return web.json_response(answer)


@routes.get(OBJECT)
@routes.get("/download" + OBJECT)
async def get_object(request: web.Request) -> web.Response:
    where, asked = request.match_info, request.query
    stored = storage.find(where["bucket"], where["name"], asked.get("generation"), asked.get("ifGenerationMatch"))
    if asked.get("alt") != "media":
        return web.json_response(stored.resource)
    resource = stored.resource
    headers = {
        "Content-Type": resource["contentType"],
        "ETag": resource["etag"],
        "Last-Modified": format_datetime(datetime.fromisoformat(resource["updated"][:-1] + "+00:00"), usegmt=True),
        "X-Goog-Generation": resource["generation"],
        "X-Goog-Metageneration": resource["metageneration"],
        "X-Goog-Hash": f"crc32c={resource['crc32c']},md5={resource['md5Hash']}",
        "X-Goog-Stored-Content-Length": resource["size"],
    }
    if resource.get("contentEncoding") == "gzip":
        if "gzip" not in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=gzip.decompress(stored.content), headers=headers)  # whole, whatever the range
        headers["Content-Encoding"] = "gzip"
    size = len(stored.content)
    ranged = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
    if ranged is None or ranged.groups() == ("", ""):
        return web.Response(body=stored.content, headers=headers)
    first, last = ranged.groups()
    start = int(first) if first else max(size - int(last), 0)
    end = min(int(last) + 1, size) if first and last else size
    if start >= end:
        raise RefusedError(416, "Request range not satisfiable", {"Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return web.Response(status=206, body=stored.content[start:end], headers=headers)


@routes.delete(OBJECT)
async def delete_object(request: web.Request) -> web.Response:
    where, asked = request.match_info, request.query
    storage.find(where["bucket"], where["name"], asked.get("generation"), asked.get("ifGenerationMatch"))
    del storage.bucket(where["bucket"])[where["name"]]
    return web.Response(status=204)


@routes.post(OBJECT + "/{verb:copyTo|rewriteTo}/b/{target_bucket}/o/{target}")
async def copy_object(request: web.Request) -> web.Response:
    where, asked = request.match_info, request.query
    changes = json.loads(await request.read() or b"{}")
    wanted = (asked.get("sourceGeneration"), asked.get("ifSourceGenerationMatch"))
    source = storage.find(where["bucket"], where["name"], *wanted)
    kept = {key: source.resource[key] for key in ("contentType", "metadata") if key in source.resource}
    resource = {**kept, **changes, "name": where["target"]}
    made = storage.store(where["target_bucket"], resource, source.content, asked.get("ifGenerationMatch"))
    if where["verb"] == "copyTo":
        return web.json_response(made)
    sizes = {"totalBytesRewritten": made["size"], "objectSize": made["size"]}
    return web.json_response({"kind": "storage#rewriteResponse", **sizes, "done": True, "resource": made})


@routes.post("/upload/storage/v1/b/{bucket}/o")
@routes.put("/upload/storage/v1/b/{bucket}/o")
async def upload(request: web.Request) -> web.Response:
    bucket, asked = request.match_info["bucket"], request.query
    body = await request.read()
    if "upload_id" in asked:
        return proceed(asked["upload_id"], request.headers.get("Content-Range", ""), body)
    condition, kind = asked.get("ifGenerationMatch"), asked.get("uploadType")
    resource = {"name": asked["name"]} if "name" in asked else {}
    if kind == "media":
        resource["contentType"] = request.headers.get("Content-Type", BYTES)
        return web.json_response(storage.store(bucket, resource, body, condition))
    if kind == "multipart":
        described, content = two_parts(request.headers.get("Content-Type", ""), body)
        return web.json_response(storage.store(bucket, {**resource, **described}, content, condition))
    if kind != "resumable":
        raise RefusedError(400, f"Unknown uploadType {kind!r}")
    resource |= json.loads(body or b"{}")
    check(condition, storage.bucket(bucket).get(resource.get("name", "")))
    identity = uuid.uuid4().hex
    sessions[identity] = Session(bucket, resource, condition)
    url = request.url.with_query({"uploadType": "resumable", "upload_id": identity})
    return web.Response(headers={"Location": str(url)})


@routes.delete("/upload/storage/v1/b/{bucket}/o")
async def cancel_upload(request: web.Request) -> web.Response:
    if sessions.pop(request.query.get("upload_id", ""), None) is None:
        raise RefusedError(404, "No such upload")
    return web.Response(status=499)


def proceed(identity: str, content_range: str, body: bytes) -> web.Response:
    """Take a piece of a resumable upload, and store the object when it is complete."""
    session = sessions.get(identity)
    if session is None:
        raise RefusedError(404, "No such upload")
    if not content_range:
        content_range = f"bytes 0-{len(body) - 1}/{len(body)}" if body else "bytes */0"
    asked = re.fullmatch(r"bytes (?:\*|(\d+)-(\d+))/(\*|\d+)", content_range)
    if asked is None:
        raise RefusedError(400, f"Invalid Content-Range {content_range!r}")
    first, last, total = asked.groups()
    if first is not None:
        if int(first) != len(session.content) or int(last) + 1 - int(first) != len(body):
            raise RefusedError(400, f"Content-Range {content_range!r} with {len(session.content)} bytes stored before")
        session.content += body
    if total != str(len(session.content)):
        stored = {"Range": f"bytes=0-{len(session.content) - 1}"} if session.content else {}
        return web.Response(status=308, headers=stored)
    made = storage.store(session.bucket, session.resource, bytes(session.content), session.condition)
    del sessions[identity]
    return web.json_response(made)


def two_parts(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a multipart/related body into the object's resource and its content.

    All lines end in CRLF, as in the RFC, or all in LF, as in gcsfs. A delimiter within the content makes a third part,
    which is refused. So a badly chosen delimiter shows here, and not as a truncated object.
    """
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_boundary()
    if boundary is None:
        raise RefusedError(400, f"No boundary in {content_type!r}")
    newline = b"\r\n" if body.partition(b"\n")[0].endswith(b"\r") else b"\n"
    _, *parts = (newline + body).split(newline + b"--" + boundary.encode())
    if len(parts) != 3 or not parts[2].startswith(b"--") or not all(part.startswith(newline) for part in parts[:2]):
        raise RefusedError(400, "Malformed multipart body.")
    described, content = (part.partition(newline * 2)[2] for part in parts[:2])
    return json.loads(described), content


def bucket_resource(name: str) -> dict[str, str]:
    return {"kind": "storage#bucket", "id": name, "name": name, "location": "US", "storageClass": "STANDARD"}


@routes.route("*", "/{path:.*}")
async def anything_else(request: web.Request) -> web.Response:
    # Not 404: clients would take that for a missing object.
    raise RefusedError(400, f"This fake does not know {request.method} {request.path}")


@web.middleware
async def errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.Response]]) -> web.Response:
    """Turn a refusal into an answer of the API."""
    try:
        if unknown := set(request.query) - PARAMETERS:
            raise RefusedError(400, f"This fake does not know {', '.join(sorted(unknown))}")
        return await handler(request)
    except RefusedError as refused:
        error = {"code": refused.status, "message": str(refused)}
        return web.json_response({"error": error}, status=refused.status, headers=refused.headers)


if __name__ == "__main__":
    app = web.Application(client_max_size=MOST_BYTES, middlewares=[errors])
    app.add_routes(routes)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None, shutdown_timeout=0)
