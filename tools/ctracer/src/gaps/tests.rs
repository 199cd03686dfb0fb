use super::*;
use crate::record::Function;

/// What happens to an object, a line each: the time in us, the thread, the function, indented by two for each
/// call that it lies in, and `}` before one that returns. Behind it, a `|` and what is expected: the part of the
/// gap before it, and the one that the object leaves, its time and the function with which it began.
fn follow(type_name: &str, text: &str) {
    let mut trace = Trace { type_name: type_name.to_owned(), ..Trace::default() };
    let (mut steps, mut shown) = (Vec::new(), Vec::new());
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let (did, expected) = line.split_once('|').unwrap();
        let mut words = did.split_whitespace();
        let time = words.next().unwrap().parse::<u64>().unwrap() * 1000;
        let thread = words.next().unwrap().parse().unwrap();
        let (name, kind) = match words.next().unwrap() {
            "}" => (words.next().unwrap(), Kind::Return),
            name => (name, Kind::Entry),
        };
        let start = did.find(name).unwrap() - if kind == Kind::Return { 2 } else { 0 };
        let number = trace.functions.iter().position(|function| function.name == name);
        let function = number.unwrap_or(trace.functions.len());
        if number.is_none() {
            trace.functions.push(Function { name: name.to_owned(), ..Function::default() });
        }
        let (depth, argument) = ((start as u32 - 12) / 2, u8::from(words.next() == Some("2nd")));
        let task = (thread, 0);
        steps.push(Step { function, life: 1, kind, time, task, depth, argument });
        shown.push((line, expected.trim().to_owned()));
    }
    let mut gaps = Gaps::new(&trace);
    for (step, (line, expected)) in steps.into_iter().zip(shown) {
        let (gap, left) = gaps.take(step);
        let name = |part: usize| common::colours::PARTS[part].name;
        let mut found = gap.map_or("-", name).to_owned();
        if let Some(Left { part, time, since }) = left {
            let since = &trace.functions[since].name;
            found += &format!(" {} {} {since}", name(part), time / 1000);
        }
        assert_eq!(found, expected, "{line}");
    }
}

/// As 7.2 does it: the completion comes while the submission has not returned, on another CPU.
#[test]
fn a_bio_waits_and_is_in_the_device() {
    let text = "
         0  7   bio_init                          | -
         1  7   } bio_init                        | -
         2  7   submit_bio_wait                   | -
         5  7     submit_bio                      | -
         6  7       submit_bio_noacct             | wait
         7  7         blk_mq_submit_bio           | wait
         8  7           bio_split_rw              | wait
         9  7           } bio_split_rw            | wait
        20  7           __rq_qos_track            | wait wait 15 submit_bio
        21  7             wbt_track               | device
        22  7             } wbt_track             | device
        23  7           } __rq_qos_track          | device
        30  7         } blk_mq_submit_bio         | device
        80  0   bio_endio                         | device device 60 __rq_qos_track
        81  7       } submit_bio_noacct           | -
        82  7     } submit_bio                    | -
        83  0     bio_wait_end_io                 | -
        84  0   } bio_endio                       | -
        85  7   } submit_bio_wait                 | -
        90  7   bio_uninit                        | -";
    follow("bio", text);
}

/// A cgroup's limit: the bio is submitted, and continues after a second, from another thread.
#[test]
fn a_bio_waits_for_its_limit() {
    let text = "
         0  7   submit_bio                        | -
         1  7     __blk_throtl_bio                | wait
         2  7       throtl_add_bio_tg             | wait
         3  7       } throtl_add_bio_tg           | wait
         4  7     } __blk_throtl_bio              | wait
         5  7   } submit_bio                      | wait
       905  0   tg_dispatch_time                  | wait
       906  0   } tg_dispatch_time                | wait
       950  9   submit_bio_noacct_nocheck         | wait
       951  9     blk_mq_submit_bio               | wait
       960  9     } blk_mq_submit_bio             | wait wait 960 submit_bio
       961  9   } submit_bio_noacct_nocheck       | device
       970  9   bio_seg_gap                       | device
       990  0   bio_endio                         | device device 30 blk_mq_submit_bio";
    follow("bio", text);
}

/// Without a function that says that there is a request, nothing says how long the device had it. Neither does a
/// completion that was missed.
#[test]
fn what_is_not_known_is_no_part() {
    let text = "
         0  7   submit_bio                        | -
         1  7     submit_bio_noacct               | wait
         2  7     } submit_bio_noacct             | wait
         3  7   } submit_bio                      | wait
        80  0   bio_endio                         | -
        99  0   bio_free                          | -";
    follow("bio", text);
    let text = "
         0  7   submit_bio                        | -
         5  7     __rq_qos_track                  | wait wait 5 submit_bio
         6  7     } __rq_qos_track                | device
         7  7   } submit_bio                      | device
        80  7   __bio_release_pages               | -
        99  7   bio_uninit                        | -";
    follow("bio", text);
    follow("inode", "         0  7   submit_bio      | -\n         9  7   bio_endio       | -");
}

/// The bio that dm is given, and its clone for the disk below.
#[test]
fn a_mapper_takes_its_time() {
    let text = "
         0  7   submit_bio                        | -
         1  7     dm_submit_bio                   | wait wait 1 submit_bio
         5  7       bio_alloc_clone               | mapper
         6  7       } bio_alloc_clone             | mapper
         9  7     } dm_submit_bio                 | mapper mapper 8 dm_submit_bio
        10  7   } submit_bio                      | -
        30  9   submit_bio_noacct                 | -
        31  9   } submit_bio_noacct               | wait
        80  0   bio_endio                         | -";
    follow("bio", text);
    let text = "
         0  7         __bio_clone                 | -
         1  7         } __bio_clone               | -
         2  7       __map_bio                     | -
         4  7         dm_submit_bio_remap         | mapper
         6  7           submit_bio_noacct         | mapper mapper 4 __map_bio
         7  7           } submit_bio_noacct       | wait
         8  7         } dm_submit_bio_remap       | -
        20  7     __submit_bio                    | wait
        21  7       __rq_qos_track                | wait wait 15 submit_bio_noacct
        22  7       } __rq_qos_track              | device
        70  0   bio_endio                         | device device 49 __rq_qos_track
        72  0     clone_endio                     | -
        74  0       bio_put                       | mapper
        78  0     } clone_endio                   | mapper mapper 6 clone_endio
        79  0   } bio_endio                       | -";
    follow("bio", text);
}

/// Between two completions of a bio lie its checksums; or other parts of it, where it was split.
#[test]
fn a_bio_completes_twice() {
    let text = "
         0  7   submit_bio                        | -
         5  7     __rq_qos_track                  | wait wait 5 submit_bio
        50  0   bio_endio                         | device device 45 __rq_qos_track
        51  0   } bio_endio                       | -
        60  9   bio_endio                         | end end 10 bio_endio";
    follow("bio", text);
    let text = "
         0  7   submit_bio                        | -
         2  7     bio_chain 2nd                   | wait
         3  7     } bio_chain 2nd                 | wait
         5  7     __rq_qos_track                  | wait wait 5 submit_bio
        50  0   bio_endio                         | device device 45 __rq_qos_track
        51  0   } bio_endio                       | -
        60  9   bio_endio                         | device device 10 bio_endio";
    follow("bio", text);
}

/// It is started twice: the driver had no room for it.
#[test]
fn a_request_is_queued_started_and_ended() {
    let text = "
         0  7   blk_mq_rq_late_init               | -
         1  7   } blk_mq_rq_late_init             | queue
        10  9   __blk_rq_map_sg                   | queue
        11  9   } __blk_rq_map_sg                 | queue
        12  9   blk_mq_start_request              | queue queue 12 blk_mq_rq_late_init
        13  9   } blk_mq_start_request            | device
        20  9   blk_mq_requeue_request            | device device 8 blk_mq_start_request
        21  9   } blk_mq_requeue_request          | queue
        30  9   blk_mq_start_request              | queue queue 10 blk_mq_requeue_request
        80  0   blk_mq_complete_request           | device
        85  0     blk_mq_end_request              | device device 55 blk_mq_start_request
        86  0       blk_update_request            | end
        90  0       } blk_update_request          | end
        91  0       blk_mq_free_request           | end
        92  0       } blk_mq_free_request         | end";
    follow("request", text);
    // Its beginning was not seen: where it was is not known.
    let text = "
         0  0   blk_mq_complete_request           | -
         5  0     blk_mq_end_request              | -
         6  0       blk_update_request            | end";
    follow("request", text);
}
