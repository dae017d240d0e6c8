"""Buckets on loopback: what tensorstore asks of Google Cloud Storage (its JSON API) and of S3, for tests without them.

`Buckets` serves them in a thread. Objects are in memory. A write may be on the
condition of a generation (`ifGenerationMatch`) or of an ETag (`If-Match`, `If-None-Match: *`), as in both.
"""

import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

PAGE = 7  # objects in an answer to a list: so few that lists have several pages


class Buckets:
    """A server of buckets. `objects` is {(bucket, name): (content, generation)}, and `before` sees each request.

    `before(method, bucket, name)` may return a number: the status that is answered in place of what was asked for.
    """

    def __init__(self, ignores_conditions=False):
        self.objects, self.busy, self.generation = {}, threading.Lock(), 1_000
        self.ignores_conditions = ignores_conditions
        self.before = lambda method, bucket, name: None
        self.requests = []  # (method, bucket, name)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"buckets": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def env(self):
        """The environment of a process that uses these buckets as gs:// and as s3://."""
        return {
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
        }

    def names(self, bucket):
        return sorted(name for where, name in self.objects if where == bucket)

    # What a request does, under the lock. A status, and the content and generation of an object.

    def get(self, bucket, name):
        with self.busy:
            return self.objects.get((bucket, name))

    def put(self, bucket, name, content, is_allowed):
        with self.busy:
            if not self.ignores_conditions and not is_allowed(self.objects.get((bucket, name))):
                return None
            self.generation += 1
            self.objects[bucket, name] = content, self.generation
            return self.generation

    def delete(self, bucket, name, is_allowed=lambda found: True):
        with self.busy:
            found = self.objects.get((bucket, name))
            if found is None:
                return 404
            if not is_allowed(found):
                return 412
            del self.objects[bucket, name]
            return 204

    def page(self, bucket, prefix, token):
        """The names of a page of those with a prefix, and the token of the next page, or "" after the last one."""
        with self.busy:
            names = [
                name for name in self.names(bucket) if name.startswith(prefix) and name > bytes.fromhex(token).decode()
            ]
        return names[:PAGE], names[PAGE - 1].encode().hex() if len(names) > PAGE else ""


def etag(content):
    return f'"{hashlib.md5(content).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = 1 << 20, True  # an answer is one packet: of two, the second waits for 40 ms
    buckets: Buckets

    def log_message(self, *args):
        pass

    def answer(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        gcs = re.fullmatch(r"(/upload)?/storage/v1/b/([^/]+)/o(?:/(.*))?", url.path)
        if gcs is None:
            bucket, _, name = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        else:
            bucket, name = gcs[2], urllib.parse.unquote(gcs[3] or "") or query.get("name", "")
        self.buckets.requests.append((self.command, bucket, name))
        status = self.buckets.before(self.command, bucket, name)
        if status is not None:
            self.answer(status)
        elif gcs is not None:
            self.as_gcs(bucket, name, query, body)
        else:
            self.as_s3(bucket, name, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def content_of(self, found, **headers):
        """Answer with an object, or with the part of it that is asked for."""
        content = found[0]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self.answer(200, content, **headers)
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        if first >= len(content):
            return self.answer(416)
        where = f"bytes {first}-{last}/{len(content)}"
        return self.answer(206, content[first : last + 1], Content_Range=where, **headers)

    def as_gcs(self, bucket, name, query, body):
        def is_allowed(found):
            wanted = query.get("ifGenerationMatch")
            return wanted is None or int(wanted) == (0 if found is None else found[1])

        if self.command == "POST":
            generation = self.buckets.put(bucket, name, body, is_allowed)
            if generation is None:
                return self.answer(412)
            about = {"name": name, "bucket": bucket, "generation": str(generation), "size": str(len(body))}
            return self.answer(200, json.dumps(about).encode(), Content_Type="application/json")
        if self.command == "DELETE":
            return self.answer(self.buckets.delete(bucket, name, is_allowed))
        if not name:
            names, token = self.buckets.page(bucket, query.get("prefix", ""), query.get("pageToken", ""))
            names = [n for n in names if n >= query.get("startOffset", "")]
            names = [n for n in names if n < query.get("endOffset", chr(0x10FFFF))]
            found = {"items": [{"name": n, "generation": "1", "size": "0"} for n in names]}
            if token:
                found["nextPageToken"] = token
            return self.answer(200, json.dumps(found).encode(), Content_Type="application/json")
        found = self.buckets.get(bucket, name)
        if found is None:
            return self.answer(404)
        if query.get("ifGenerationNotMatch") == str(found[1]):
            return self.answer(304)
        if query.get("ifGenerationMatch", str(found[1])) != str(found[1]):
            return self.answer(412)
        return self.content_of(found, x_goog_generation=found[1], x_goog_metageneration=1)

    def as_s3(self, bucket, name, query, body):
        def is_allowed(found):
            if self.headers.get("If-None-Match") == "*" and found is not None:
                return False
            wanted = self.headers.get("If-Match")
            return wanted is None or (found is not None and etag(found[0]) == wanted)

        if self.command == "PUT":
            generation = self.buckets.put(bucket, name, body, is_allowed)
            return self.answer(412) if generation is None else self.answer(200, ETag=etag(body))
        if self.command == "DELETE":
            self.buckets.delete(bucket, name)
            return self.answer(204)
        if not name and self.command == "GET":
            names, token = self.buckets.page(bucket, query.get("prefix", ""), query.get("continuation-token", ""))
            keys = "".join(f"<Contents><Key>{escape(n)}</Key></Contents>" for n in names)
            next_page = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
            text = (
                '<?xml version="1.0" encoding="UTF-8"?>'
                '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
                f"<KeyCount>{len(names)}</KeyCount><IsTruncated>{str(bool(token)).lower()}</IsTruncated>{keys}{next_page}"
                "</ListBucketResult>"
            )
            return self.answer(200, text.encode(), Content_Type="application/xml")
        found = self.buckets.get(bucket, name)
        if found is None:
            return self.answer(404)
        tag = etag(found[0])
        if self.headers.get("If-None-Match") == tag:
            return self.answer(304, ETag=tag)
        if self.headers.get("If-Match", tag) != tag:
            return self.answer(412)
        return self.content_of(found, ETag=tag)
