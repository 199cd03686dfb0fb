//! The names of error numbers, as <errno.h> and the kernel have them.

use nix::errno::Errno;

/// Errors that stay within the kernel, which no header for programs has.
const INTERNAL: [(i64, &str); 19] = [
    (512, "ERESTARTSYS"),
    (513, "ERESTARTNOINTR"),
    (514, "ERESTARTNOHAND"),
    (515, "ENOIOCTLCMD"),
    (516, "ERESTART_RESTARTBLOCK"),
    (517, "EPROBE_DEFER"),
    (518, "EOPENSTALE"),
    (519, "ENOPARAM"),
    (521, "EBADHANDLE"),
    (522, "ENOTSYNC"),
    (523, "EBADCOOKIE"),
    (524, "ENOTSUPP"),
    (525, "ETOOSMALL"),
    (526, "ESERVERFAULT"),
    (527, "EBADTYPE"),
    (528, "EJUKEBOX"),
    (529, "EIOCBQUEUED"),
    (530, "ERECALLCONFLICT"),
    (531, "ENOGRACE"),
];

/// The name of the error that a result stands for: `EINVAL` for -22.
pub fn of(result: i64) -> Option<String> {
    let number = result.checked_neg().filter(|&number| number > 0)?;
    if let Some((_, name)) = INTERNAL.iter().find(|(known, _)| *known == number) {
        return Some((*name).to_owned());
    }
    let known = Errno::from_raw(i32::try_from(number).ok()?);
    (known != Errno::UnknownErrno).then(|| format!("{known:?}"))
}

#[cfg(test)]
mod tests {
    use super::of;

    #[test]
    fn numbers_have_the_names_of_the_system() {
        let known = [
            (libc::EPERM, "EPERM"),
            (libc::EINVAL, "EINVAL"),
            (libc::EAGAIN, "EAGAIN"),
            (libc::ELOOP, "ELOOP"),
            (libc::ENOMSG, "ENOMSG"),
            (libc::EOPNOTSUPP, "EOPNOTSUPP"),
            (libc::EHWPOISON, "EHWPOISON"),
            (512, "ERESTARTSYS"),
            (517, "EPROBE_DEFER"),
            (524, "ENOTSUPP"),
            (529, "EIOCBQUEUED"),
        ];
        for (number, expected) in known {
            assert_eq!(of(i64::from(-number)).as_deref(), Some(expected));
        }
        assert_eq!(
            [0, 22, -41, -58, -134, -511, -520, -532, i64::MIN].map(of),
            [const { None }; 9]
        );
    }
}
