"""Exercises on checkpoints: atomic files, verification, the order of a save, and errors on all ranks."""

from workshop.exercises.checks.checkpoints import (
    check_atomic_write,
    check_publication,
    check_shared_errors,
    check_verification,
)
from workshop.exercises.exercise import Exercise, Mistake, plant_mistake

EXERCISES = [
    Exercise(
        name="checkpoints.1",
        title="Write a file atomically",
        targets=("nanoGPT.files:write_atomically",),
        task="""A run can be killed at any moment, and a machine can lose power. A reader must see either the old
        file or the complete new one. unique_name returns the name of a temporary file.""",
        minutes=10,
        difficulty="easy",
        check=check_atomic_write,
        nudge="Which operation of a file system is atomic?",
        idea="Write a temporary file in the same directory, flush it to the disk, and rename it over the old one.",
        line="os.replace",
        mistakes=(
            Mistake(
                (
                    ("temporary = path.with_name(unique_name(path.name))", "temporary = path"),
                    ("os.replace(temporary, path)", "pass"),
                    ("temporary.unlink(missing_ok=True)", "pass"),
                ),
                "written into the file itself",
            ),
            plant_mistake("            os.fsync(file.fileno())\n", "", "There is no fsync before the rename"),
            plant_mistake("temporary.unlink(missing_ok=True)", "pass", "delete the temporary file"),
            plant_mistake("            file.flush()\n", "", "in Python's buffer"),
            plant_mistake("os.replace(", "path.unlink()\n        os.replace(", "a reader finds no file"),
            plant_mistake("finally:", "except OSError:\n        pass\n    finally:", "reported as a success"),
        ),
    ),
    Exercise(
        name="checkpoints.2",
        title="Verify the files of a checkpoint",
        targets=("nanoGPT.checkpoint.manifest:verify_files",),
        task="""Disks and networks damage files without an error message. Compare each file with its entry in the
        manifest, and raise DamagedCheckpoint with the name of the first file that differs. Rank r of N verifies
        every N-th file.""",
        minutes=10,
        difficulty="easy",
        check=check_verification,
        nudge="Which damage does the size not show?",
        idea="manifest['files'][rank::world_size]; size_of returns None for a missing file; sha256_of reads the "
        "content.",
        line="for file in manifest",
        mistakes=(
            plant_mistake('if digest != file["sha256"]:', "if False:", "A flipped byte is not detected"),
            plant_mistake("[rank::world_size]", "", "Every rank would read the full checkpoint"),
        ),
    ),
    Exercise(
        name="checkpoints.3",
        title="Publish a checkpoint",
        targets=("nanoGPT.checkpoint.directory:CheckpointDirectory._publish",),
        task="""All ranks have written and flushed their files into the directory `temporary`. Write the manifest
        with write_atomically and serialize_manifest, and give the directory its final name, so that a kill at any
        moment leaves either a complete checkpoint or none. fsync_path flushes a directory. At the end, replace the
        file LATEST, which is optional: a resume does not need it, and a save does not fail without it.""",
        minutes=15,
        difficulty="medium",
        check=check_publication,
        nudge="Which step makes the checkpoint visible to a reader?",
        idea="manifest, fsync of the directory, rename, fsync of the parent directory, LATEST.",
        line="temporary.rename(final)",
        mistakes=(
            Mistake(
                (
                    ("    fsync_path(temporary)\n    temporary.rename(final)\n", ""),
                    (
                        '    write_atomically(temporary / "manifest.json", serialize_manifest(manifest).encode())\n',
                        "    fsync_path(temporary)\n    temporary.rename(final)\n"
                        '    write_atomically(final / "manifest.json", serialize_manifest(manifest).encode())\n',
                    ),
                ),
                "The rename must be the last step",
            ),
            plant_mistake("    fsync_path(self.root)\n", "", "The parent directory is not flushed"),
            plant_mistake("    fsync_path(temporary)\n", "", "The temporary directory is not flushed"),
            plant_mistake("with contextlib.suppress(OSError):", "if True:", "suppress this OSError"),
        ),
    ),
    Exercise(
        name="checkpoints.4",
        title="Let all ranks fail together",
        targets=("nanoGPT.distributed.runtime:Runtime.call_on_all",),
        task="""In a save, the disk of one rank may be full. If only this rank raises an error, the others wait for
        it in the next collective. Call the task on every rank, exchange results and failures with self.gather, and
        raise the failure of the first rank that failed on all ranks. Pass on the message of a ConfigError. Convert an
        OSError to a ConfigError, and any other error to a RunError, whose message names the rank;
        quote_cause(error) returns the reason as text. A PeerFailed of this rank needs no reason, because another
        rank reports it.""",
        minutes=20,
        difficulty="medium",
        ranks=2,
        check=check_shared_errors,
        nudge="Every rank must reach the same collective, also the rank whose task failed.",
        idea="Catch the exception, gather (result, failure) of all ranks, then raise or return on every rank alike.",
        line="results, failures =",
        mistakes=(
            plant_mistake("except Exception as error:", "except ValueError as error:", "exchange it with all ranks"),
            plant_mistake("if any(failures):", "if failure:", "continues after the failure of rank 1"),
            plant_mistake("failure = ConfigError(reason", "raise ConfigError(reason", "before it reaches self.gather"),
            plant_mistake("if isinstance(error, OSError) else RunError(reason)", "", "becomes a ConfigError"),
            plant_mistake("next(filter(None, failures))", "failures[-1]", "the first rank"),
        ),
        on_hang="A rank that failed does not reach self.gather, and the others wait for it there.",
    ),
]
