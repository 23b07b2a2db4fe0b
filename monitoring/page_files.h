// The files in page/, as they are; page_files.cc is made by the build.
#pragma once

namespace kvmanager::page_files {

extern const char kHtml[], kCss[], kJs[];

}  // namespace kvmanager::page_files
