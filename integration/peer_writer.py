"""Save files until killed: ``peer_writer.py URL SEED LEVEL``. Prints the number of each file that reached the level."""

import itertools
import random
import sys

import fsspec

SIZES = (500, 90_000, 300_000, 2_000_000)


def content(seed, number):
    noise = random.Random(f"{seed} {number}")
    return noise.randbytes(noise.choice(SIZES))


def main():
    url, seed, level = sys.argv[1:]
    fs, root = fsspec.core.url_to_fs(url, ack=level)
    for number in itertools.count():
        # Each third file replaces the last but two, so that drafts build on drafts of the same path.
        fs.pipe_file(f"{root}/run{seed}/{number - number % 3}", content(seed, number))
        print(number, flush=True)


if __name__ == "__main__":
    main()
