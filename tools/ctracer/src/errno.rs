//! The names of error numbers, as <errno.h> and the kernel have them.

use nix::errno::Errno;

/// Errors that stay within the kernel, which no header for programs has, from 512 on.
const INTERNAL: &str = "ERESTARTSYS ERESTARTNOINTR ERESTARTNOHAND ENOIOCTLCMD ERESTART_RESTARTBLOCK \
    EPROBE_DEFER EOPENSTALE ENOPARAM - EBADHANDLE ENOTSYNC EBADCOOKIE ENOTSUPP ETOOSMALL ESERVERFAULT \
    EBADTYPE EJUKEBOX EIOCBQUEUED ERECALLCONFLICT ENOGRACE";

/// The name of the error that a result stands for: `EINVAL` for -22.
pub fn name(result: i64) -> Option<String> {
    let number = result.checked_neg().filter(|&number| number > 0)?;
    if let Some(place) = number.checked_sub(512).filter(|&place| place >= 0) {
        let name = INTERNAL.split(' ').nth(place as usize);
        return name.filter(|&name| name != "-").map(str::to_owned);
    }
    let known = Errno::from_raw(number as i32);
    (known != Errno::UnknownErrno).then(|| format!("{known:?}"))
}

#[cfg(test)]
mod tests {
    use super::name;

    #[test]
    fn numbers_have_the_names_of_the_system() {
        let known = [
            (1, "EPERM"),
            (22, "EINVAL"),
            (11, "EAGAIN"),
            (40, "ELOOP"),
            (42, "ENOMSG"),
            (95, "EOPNOTSUPP"),
            (133, "EHWPOISON"),
            (512, "ERESTARTSYS"),
            (517, "EPROBE_DEFER"),
            (524, "ENOTSUPP"),
            (529, "EIOCBQUEUED"),
        ];
        for (number, expected) in known {
            assert_eq!(name(-number).as_deref(), Some(expected));
        }
        assert_eq!(
            [0, 22, -41, -58, -134, -511, -520, -532, i64::MIN].map(name),
            [const { None }; 9]
        );
    }
}
