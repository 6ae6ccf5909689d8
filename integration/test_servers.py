"""The servers that stand in for the clouds start, serve their filesystem, and are as strict as documented."""

import base64
import hashlib
import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote, urlencode

import pytest
from servers import azurite, ceph, gcs_emulator, gcs_fake, ministack, moto

pytestmark = pytest.mark.filterwarnings("default")

SERVERS = {
    module.__name__.partition(".")[2]: module for module in (ministack, moto, ceph, azurite, gcs_emulator, gcs_fake)
}
IGNORE_CONDITIONS = {"gcs_emulator"}
ACCEPT_A_WRONG_MD5 = {"moto"}


@pytest.fixture(scope="module", params=SERVERS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def server(name):
    SERVERS[name].require()
    with SERVERS[name].running() as server:
        yield server


@pytest.fixture
def fs(server):
    import fsspec

    # botocore retries content that arrived damaged.
    once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}} if server.protocol == "s3" else {}
    return fsspec.filesystem(server.protocol, use_listings_cache=False, **once, **server.options)


@pytest.fixture
def root(server):
    return server.new_root()


def put_with_md5(server, fs, path, content, md5):
    """Put with an MD5 in one request, by each filesystem's own call."""
    encoded = base64.b64encode(md5).decode()
    if server.protocol == "s3":
        fs.pipe_file(path, content, ContentMD5=encoded)
    elif server.protocol == "abfs":
        fs.pipe_file(path, content, headers={"Content-MD5": encoded})
    else:
        bucket, _, key = path.partition("/")
        status, _, body = upload(server, bucket, key, content, md5Hash=encoded)
        if status != 200:
            raise OSError(body)


def test_a_server_stores_reads_ranges_lists_and_removes(fs, root):
    content = bytes(range(256)) * 4
    fs.pipe_file(f"{root}/a", content)
    fs.pipe_file(f"{root}/deep/b", b"b")
    assert fs.cat_file(f"{root}/a") == content
    assert fs.cat_file(f"{root}/a", start=100, end=300) == content[100:300]
    assert sorted(fs.ls(root, detail=False)) == [f"{root}/a", f"{root}/deep"]
    assert fs.find(root) == [f"{root}/a", f"{root}/deep/b"]
    assert fs.info(f"{root}/a")["size"] == 1024
    fs.rm_file(f"{root}/a")
    assert fs.find(root) == [f"{root}/deep/b"]
    with pytest.raises(FileNotFoundError):
        fs.cat_file(f"{root}/a")


def test_every_root_is_in_a_bucket_of_its_own(server, fs):
    first, second = server.new_root(), server.new_root()
    fs.pipe_file(f"{first}/a", b"a")
    assert first.partition("/")[0] != second.partition("/")[0]
    assert fs.find(second.partition("/")[0]) == []


def test_only_one_of_many_creates_an_object(name, fs, root):
    def create(number):
        try:
            fs.pipe_file(f"{root}/a", b"%d" % number, mode="create")
        except OSError:  # includes FileExistsError; s3fs raises EINVAL for errors that it does not recognise
            return None
        return number

    with ThreadPoolExecutor(8) as threads:
        winners = [number for number in threads.map(create, range(8)) if number is not None]
    if name in IGNORE_CONDITIONS:
        assert winners == list(range(8))
    else:
        [winner] = winners
        assert create(9) is None
        assert fs.cat_file(f"{root}/a") == b"%d" % winner


def test_content_that_has_another_md5_is_refused(name, server, fs, root):
    put_with_md5(server, fs, f"{root}/right", b"content", hashlib.md5(b"content").digest())
    assert fs.cat_file(f"{root}/right") == b"content"
    if name in ACCEPT_A_WRONG_MD5:
        put_with_md5(server, fs, f"{root}/wrong", b"content", bytes(16))
        assert fs.cat_file(f"{root}/wrong") == b"content"
        return
    with pytest.raises(Exception, match=r"(?i)md5|Errno 22"):
        put_with_md5(server, fs, f"{root}/wrong", b"content", bytes(16))
    assert not fs.exists(f"{root}/wrong")


# The fake, by raw requests.


@pytest.fixture(scope="module")
def fake():
    gcs_fake.require()
    with gcs_fake.running() as server:
        yield server


@pytest.fixture
def bucket(fake):
    return fake.new_root().partition("/")[0]


def ask(server, method, path, content=b"", headers=None, **query):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, f"{path}?{urlencode(query)}", content, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def upload(server, bucket, key, content, query=None, newline="\r\n", **resource):
    described = json.dumps({"name": key, **resource})
    head = ["--a-b", "Content-Type: application/json", "", described, "--a-b", "Content-Type: text/plain", "", ""]
    body = newline.join(head).encode() + content + f"{newline}--a-b--{newline}".encode()
    headers = {"Content-Type": "multipart/related; boundary=a-b"}
    return ask(
        server, "POST", f"/upload/storage/v1/b/{bucket}/o", body, headers, uploadType="multipart", **(query or {})
    )


def generation_of(answer):
    status, _, body = answer
    assert status == 200, body
    return int(json.loads(body)["generation"])


def at(bucket, key):
    return f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}"


def media(server, bucket, key, headers=None, **query):
    return ask(server, "GET", at(bucket, key), headers=headers, alt="media", **query)


def test_generations_only_grow(fake, bucket):
    first = generation_of(upload(fake, bucket, "a", b"1"))
    second = generation_of(upload(fake, bucket, "a", b"2"))
    assert ask(fake, "DELETE", at(bucket, "a"))[0] == 204
    third = generation_of(upload(fake, bucket, "a", b"1"))
    assert first < second < third


def test_an_upload_is_stored_on_the_generation_it_names_alone(fake, bucket):
    assert upload(fake, bucket, "a", b"1", {"ifGenerationMatch": 7})[0] == 412
    first = generation_of(upload(fake, bucket, "a", b"1", {"ifGenerationMatch": 0}))
    assert upload(fake, bucket, "a", b"2", {"ifGenerationMatch": 0})[0] == 412
    assert upload(fake, bucket, "a", b"2", {"ifGenerationMatch": first + 1})[0] == 412
    assert media(fake, bucket, "a")[2] == b"1"
    generation_of(upload(fake, bucket, "a", b"2", {"ifGenerationMatch": first}))
    assert media(fake, bucket, "a")[2] == b"2"


def test_reads_and_removals_keep_to_the_generation_they_name(fake, bucket):
    old = generation_of(upload(fake, bucket, "a", b"old"))
    new = generation_of(upload(fake, bucket, "a", b"new"))
    assert media(fake, bucket, "a", generation=old)[0] == 404
    assert media(fake, bucket, "a", ifGenerationMatch=old)[0] == 412
    status, headers, body = media(fake, bucket, "a", generation=new, ifGenerationMatch=new)
    assert (status, headers["x-goog-generation"], body) == (200, str(new), b"new")
    assert ask(fake, "DELETE", at(bucket, "a"), ifGenerationMatch=old)[0] == 412
    assert ask(fake, "DELETE", at(bucket, "a"), generation=old)[0] == 404
    assert ask(fake, "DELETE", at(bucket, "a"), ifGenerationMatch=new)[0] == 204
    assert ask(fake, "DELETE", at(bucket, "a"), ifGenerationMatch=new)[0] == 404


@pytest.mark.parametrize("newline", ["\r\n", "\n"])
def test_content_that_has_another_crc32c_is_refused_and_not_stored(fake, bucket, newline):
    # CRC-32C of "123456789", its published check value.
    right = base64.b64encode(0xE3069283.to_bytes(4, "big")).decode()
    status, _, body = upload(fake, bucket, "a", b"123456780", newline=newline, crc32c=right)
    assert (status, b"crc32c" in body) == (400, True)
    assert media(fake, bucket, "a")[0] == 404
    generation_of(upload(fake, bucket, "a", b"123456789", newline=newline, crc32c=right))
    status, headers, body = media(fake, bucket, "a")
    assert (status, body) == (200, b"123456789")
    assert headers["x-goog-hash"].startswith(f"crc32c={right},md5=")


@pytest.mark.parametrize("newline", ["\r\n", "\n"])
@pytest.mark.parametrize("content", [b"", b"\r", b"\n", b"\r\n\r\n", b"x--a-b", b"\n\n--a-", b"x\r\n"])
def test_content_comes_back_as_it_was_sent_whatever_its_lines_end_in(fake, bucket, newline, content):
    generation_of(upload(fake, bucket, "a", content, newline=newline))
    assert media(fake, bucket, "a")[2] == content


@pytest.mark.parametrize("content", [b"one\r\n--a-b\r\ntwo", b"one\r\n--a-b", b"--a-b\r\ntwo"])
def test_content_that_holds_the_delimiter_is_refused_not_cut_short(fake, bucket, content):
    status, _, body = upload(fake, bucket, "a", content)
    assert (status, b"Malformed" in body) == (400, True)
    assert media(fake, bucket, "a")[0] == 404


def test_ranges_and_what_lies_past_the_end(fake, bucket):
    upload(fake, bucket, "a", b"0123456789")

    def ranged(text):
        status, headers, body = media(fake, bucket, "a", {"Range": f"bytes={text}"})
        return status, headers["content-range"], body if status == 206 else b""

    assert ranged("2-4") == (206, "bytes 2-4/10", b"234")
    assert ranged("8-20") == (206, "bytes 8-9/10", b"89")
    assert ranged("-3") == (206, "bytes 7-9/10", b"789")
    assert ranged("10-") == (416, "bytes */10", b"")


def test_uploads_in_pieces_are_stored_whole_and_on_their_condition(fake, bucket):
    import fsspec

    fs = fsspec.filesystem("gcs", use_listings_cache=False, **fake.options)
    content = bytes(range(251)) * 3_000
    fs.pipe_file(f"{bucket}/a", content, chunksize=1 << 18, mode="create")
    assert fs.cat_file(f"{bucket}/a") == content
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{bucket}/a", content[::-1], chunksize=1 << 18, mode="create")
    with fs.open(f"{bucket}/b", "wb", block_size=1 << 18) as file:
        file.write(content)
    assert fs.cat_file(f"{bucket}/b") == content
    fs.pipe_file(f"{bucket}/a", b"", metadata={"key": "value"})
    assert fs.info(f"{bucket}/a")["metadata"] == {"key": "value"}


def test_copies_and_moves(fake, bucket):
    import fsspec

    fs = fsspec.filesystem("gcs", use_listings_cache=False, **fake.options)
    fs.pipe_file(f"{bucket}/deep/a", b"a")
    fs.cp_file(f"{bucket}/deep/a", f"{bucket}/deep/b")
    fs.mv(f"{bucket}/deep/a", f"{bucket}/deep/c")
    assert fs.find(bucket) == [f"{bucket}/deep/b", f"{bucket}/deep/c"]
    copied = f"{at(bucket, 'deep/b')}/copyTo/b/{bucket}/o/d"
    assert ask(fake, "POST", copied, ifGenerationMatch=0)[0] == 200
    assert ask(fake, "POST", copied, ifGenerationMatch=0)[0] == 412
    assert ask(fake, "POST", copied, ifSourceGenerationMatch=7)[0] == 412


def test_listings_come_in_pages(fake, bucket):
    import fsspec

    fs = fsspec.filesystem("gcs", use_listings_cache=False, **fake.options)
    names = sorted([f"x/{number:04}" for number in range(1_100)] + [f"y{number}/z" for number in range(5)])
    fs.pipe({f"{bucket}/{name}": b"" for name in names})

    def pages(**query):
        token: dict[str, str] = {}
        while True:
            page = json.loads(ask(fake, "GET", f"/storage/v1/b/{bucket}/o", **query, **token)[2])
            yield [item["name"] for item in page["items"]], page["prefixes"]
            if "nextPageToken" not in page:
                return
            token = {"pageToken": page["nextPageToken"]}

    whole = list(pages())
    assert [len(items) for items, _ in whole] == [1_000, 105]
    assert [name for items, _ in whole for name in items] == names
    assert list(pages(delimiter="/", maxResults=4)) == [([], ["x/", "y0/", "y1/", "y2/"]), ([], ["y3/", "y4/"])]
    assert list(pages(prefix="x/109", maxResults=6)) == [(names[1090:1096], []), (names[1096:1100], [])]
    assert fs.find(bucket) == [f"{bucket}/{name}" for name in names]


def test_what_the_fake_does_not_know_it_refuses(fake, bucket):
    upload(fake, bucket, "a", b"1")
    assert ask(fake, "DELETE", at(bucket, "a"), ifMetagenerationMatch=7)[0] == 400
    assert ask(fake, "PATCH", at(bucket, "a"), b"{}")[0] == 400
    assert media(fake, bucket, "a")[2] == b"1"
