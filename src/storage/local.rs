//! Local files that survive a crash: written aside, synced, then published in one step.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{AtFlags, CWD, linkat},
    io::Errno,
};

/// Creates a file whole; fails if one is there. A hard link is the one step that is atomic
/// with its content and never replaces. What is linked has no name until then, so that nothing
/// is left of a process that is killed.
pub(super) fn create(path: &Path, content: &[u8]) -> io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent)?;
    let mut file = tempfile::tempfile_in(parent)?;
    file.write_all(content)?;
    file.sync_all()?;
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    match linkat(CWD, unnamed, CWD, path, AtFlags::SYMLINK_FOLLOW) {
        // A file system without unnamed files.
        Err(Errno::NOENT) => create_by_name(path, content)?,
        linked => linked?,
    }
    sync_folder(path)
}

fn create_by_name(path: &Path, content: &[u8]) -> io::Result<()> {
    let aside = write_aside(path, content)?;
    let linked = fs::hard_link(&aside, path);
    fs::remove_file(&aside)?;
    linked
}

/// Replaces a file whole.
pub(super) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let aside = write_aside(path, content)?;
    if let Err(error) = fs::rename(&aside, path) {
        fs::remove_file(&aside)?;
        return Err(error);
    }
    sync_folder(path)
}

/// Writes a file that only shows that it can be written. In place, so that it is never half
/// hidden: others that start at the same time remove probes.
pub(super) fn write_probe(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let written = File::create(path).and_then(|mut file| {
        file.write_all(content)?;
        file.sync_all()
    });
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(path);
    }
    written
}

/// Renames a folder whose files are on disk; fails if the target is there. (A rename onto an
/// empty folder would succeed, so the target is looked for first.)
pub(super) fn rename_folder(from: &Path, to: &Path) -> io::Result<()> {
    if to.exists() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::rename(from, to).map_err(|error| match error.kind() {
        io::ErrorKind::DirectoryNotEmpty => io::ErrorKind::AlreadyExists.into(),
        _ => error,
    })?;
    sync_folder(to)
}

/// Removes a file or a folder with all that is in it.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// The content in a hidden sibling, on disk.
fn write_aside(path: &Path, content: &[u8]) -> io::Result<PathBuf> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let unique = format!("{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let aside = path.with_file_name(format!(".{name}.{unique}.tmp"));
    let written = File::create(&aside).and_then(|mut file| {
        file.write_all(content)?;
        file.sync_all()
    });
    if let Err(error) = written {
        // The first error is the one to tell; a leftover is hidden and named as temporary.
        let _ = fs::remove_file(&aside);
        return Err(error);
    }
    Ok(aside)
}

fn sync_folder(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), sync)
}

/// All files and folders below a folder, itself last.
pub(super) fn tree(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { paths.extend(tree(&path)?) } else { paths.push(path) }
    }
    paths.push(folder.to_path_buf());
    Ok(paths)
}

/// Waits until a file or folder is on disk.
pub(super) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
