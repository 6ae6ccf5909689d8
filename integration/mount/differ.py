"""Do the same random operations in two directories and compare every result, like `fsx` with names and threads.

python integration/mount/differ.py DIRECTORY REFERENCE [--operations 20000] [--seed 1] [--threads 8]
"""

import argparse
import errno
import mmap
import os
import random
import stat
import sys
import threading

SIZE_MAX = 3 << 20
NAMES = 12
OPEN_MAX = 6
KINDS = [
    *["open"] * 2,
    *["pwrite"] * 3,
    *["pread"] * 3,
    *["close"] * 2,
    *["truncate", "append", "allocate", "fsync", "mmap_read", "mmap_write"],
    *["whole", "exclusive", "path_truncate", "emptied", "chmod", "utime", "stat"],
    *["rename", "unlink", "mkdir", "rmdir", "rename_directory", "list"],
]


class Differ:
    """One thread's part: a directory of its own in both places."""

    def __init__(self, places, seed, name="d"):
        self.random = random.Random(seed)
        self.seed = seed
        self.places = [os.path.join(place, name) for place in places]
        for place in self.places:
            os.makedirs(place, exist_ok=True)
        self.open_files = []
        self.done = 0
        self.log = []

    def both(self, what, act):
        """Act in both places. Results, or errnos, must be equal."""
        results = []
        for index, place in enumerate(self.places):
            try:
                results.append(("ok", act(index, place)))
            except OSError as error:
                results.append(("error", errno.errorcode.get(error.errno, error.errno)))
        self.log.append(f"{what}: {str(results[1])[:60]}")
        if results[0] != results[1]:
            last = "\n".join(self.log[-15:])
            raise AssertionError(
                f"seed {self.seed}, operation {self.done}, {what}: {str(results[0])[:200]} != {str(results[1])[:200]}\n{last}"
            )
        return results[1]

    def name(self):
        name = f"f{self.random.randrange(NAMES)}"
        return name if self.random.random() < 0.7 else f"s{self.random.randrange(3)}/{name}"

    def size(self):
        return self.random.randrange(self.random.choice([200, 200, 70_000, 70_000, SIZE_MAX]))

    def data(self, size):
        return self.random.randbytes(min(size, 300_000))

    def step(self):
        self.done += 1
        getattr(self, self.random.choice(KINDS))()

    def open(self):
        if len(self.open_files) >= OPEN_MAX:
            self.close()
        name = self.name()
        # Without O_TRUNC: in a mount of tierfs, a program that has the file open keeps its bytes, by design.
        flags = self.random.choice(
            [os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_RDWR | os.O_CREAT | os.O_APPEND]
        )
        fds = [None, None]

        def act(index, place):
            fds[index] = os.open(os.path.join(place, name), flags, 0o640)

        if self.both(f"open {name} {flags:#x}", act)[0] == "ok":
            self.open_files.append((name, flags, fds))

    def pick(self):
        return self.random.choice(self.open_files) if self.open_files else None

    def on_open(self, what, act):
        picked = self.pick()
        if picked is not None:
            name, flags, fds = picked
            return self.both(f"{what} {name} {flags:#x}", lambda index, _: act(fds[index]))
        return None

    def pwrite(self):
        data, offset = self.data(self.size()), self.size()
        self.on_open(f"pwrite {len(data)}@{offset}", lambda fd: os.pwrite(fd, data, offset))

    def append(self):
        data = self.data(self.size())
        self.on_open(f"write {len(data)}", lambda fd: os.write(fd, data))

    def pread(self):
        size, offset = self.size(), self.size()
        self.on_open(f"pread {size}@{offset}", lambda fd: os.pread(fd, size, offset))

    def truncate(self):
        size = self.size()
        self.on_open(f"ftruncate {size}", lambda fd: os.ftruncate(fd, size))

    def allocate(self):
        offset, size = self.size(), 1 + self.size()
        self.on_open(f"fallocate {size}@{offset}", lambda fd: os.posix_fallocate(fd, offset, size))

    def fsync(self):
        self.on_open("fsync", os.fsync)

    def close(self):
        if not self.open_files:
            return
        name, _, fds = self.open_files.pop(self.random.randrange(len(self.open_files)))
        self.both(f"close {name}", lambda index, _: os.close(fds[index]))

    def close_all(self):
        while self.open_files:
            self.close()

    def mmap_read(self):
        def act(fd):
            size = os.fstat(fd).st_size
            if not size:
                return b""
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
                return bytes(mapped)

        self.on_open("mmap read", act)

    def mmap_write(self):
        seed, data = self.random.random(), self.data(5000)

        def act(fd):
            size = os.fstat(fd).st_size
            if not size:
                return
            with mmap.mmap(fd, size, access=mmap.ACCESS_WRITE) as mapped:
                at = int(seed * size)
                part = data[: size - at]
                mapped[at : at + len(part)] = part
                mapped.flush()

        self.on_open("mmap write", act)

    def whole(self):
        """Write a new file and rename it into place, as careful programs do."""
        name, data = self.name(), self.data(self.size())

        def act(_, place):
            temporary = os.path.join(place, "tmp")
            with open(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, os.path.join(place, name))

        self.both(f"whole {name} {len(data)}", act)
        self.both(
            "remove tmp",
            lambda _, place: os.path.exists(os.path.join(place, "tmp")) and os.unlink(os.path.join(place, "tmp")),
        )

    def exclusive(self):
        name = self.name()

        def act(_, place):
            os.close(os.open(os.path.join(place, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

        self.both(f"exclusive {name}", act)

    def emptied(self):
        """Open with O_TRUNC and write, unless a program may have the file open."""
        name, data = self.name(), self.data(self.size())
        if self.open_files:
            return

        def act(_, place):
            with open(os.path.join(place, name), "wb") as file:
                file.write(data)

        self.both(f"emptied {name} {len(data)}", act)

    def rename(self):
        old, new = self.name(), self.name()
        self.both(f"rename {old} {new}", lambda _, place: os.rename(os.path.join(place, old), os.path.join(place, new)))

    def rename_directory(self):
        old, new = f"s{self.random.randrange(3)}", f"s{self.random.randrange(3)}"
        self.both(f"rename {old} {new}", lambda _, place: os.rename(os.path.join(place, old), os.path.join(place, new)))

    def unlink(self):
        name = self.name()
        self.both(f"unlink {name}", lambda _, place: os.unlink(os.path.join(place, name)))

    def mkdir(self):
        name = f"s{self.random.randrange(3)}"
        self.both(f"mkdir {name}", lambda _, place: os.mkdir(os.path.join(place, name)))

    def rmdir(self):
        name = f"s{self.random.randrange(3)}"
        self.both(f"rmdir {name}", lambda _, place: os.rmdir(os.path.join(place, name)))

    def chmod(self):
        name, mode = self.name(), self.random.choice([0o600, 0o644, 0o755])
        self.both(f"chmod {name} {mode:o}", lambda _, place: os.chmod(os.path.join(place, name), mode))

    def utime(self):
        name, when = self.name(), self.random.randrange(2_000_000_000)
        path = lambda place: os.path.join(place, name)  # noqa: E731
        self.both(f"utime {name}", lambda _, place: os.utime(path(place), (when, when)))
        self.both(f"mtime {name}", lambda _, place: os.stat(path(place)).st_mtime_ns == when * 10**9)

    def path_truncate(self):
        name, size = self.name(), self.size()
        self.both(f"truncate {name} {size}", lambda _, place: os.truncate(os.path.join(place, name), size))

    def stat(self):
        name = self.name()

        def act(_, place):
            status = os.stat(os.path.join(place, name))
            return status.st_mode, status.st_nlink, status.st_size if stat.S_ISREG(status.st_mode) else 0

        self.both(f"stat {name}", act)

    def list(self):
        self.both("list", lambda _, place: sorted((entry.name, entry.is_dir()) for entry in os.scandir(place)))

    def compare(self):
        def act(_, place):
            found = {}
            for folder, names, files in os.walk(place):
                for name in names + files:
                    path = os.path.join(folder, name)
                    with open(path, "rb") if name in files else open(os.devnull, "rb") as file:
                        found[os.path.relpath(path, place)] = (oct(os.stat(path).st_mode), file.read())
            return found

        self.both("compare", act)


def run(places, operations, seed, threads=1, remount=None, rounds=3):
    """Run the operations. ``remount`` is called after each round, when all files are closed."""
    differs = [Differ(places, seed + number, f"d{number}") for number in range(threads)]
    for _ in range(rounds):
        errors = []

        def work(differ, errors=errors):
            try:
                for _ in range(operations // rounds // threads):
                    differ.step()
                differ.close_all()
                differ.compare()
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=work, args=(differ,)) for differ in differs[1:]]
        for worker in workers:
            worker.start()
        work(differs[0])
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]
        if remount is not None:
            remount()
            for differ in differs:
                differ.compare()
    return sum(differ.done for differ in differs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("reference")
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    print(run([given.directory, given.reference], given.operations, given.seed, given.threads))
    sys.exit(0)
