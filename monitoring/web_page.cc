#include "monitoring/web_page.h"

#include <chrono>
#include <utility>

#include "kvmanager/base/status.h"
#include "monitoring/page_files.h"

namespace kvmanager {
namespace {

struct File {
  std::string type;
  std::shared_ptr<const std::string> content;
};

int64_t UnixMs() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

}  // namespace

absl::StatusOr<std::unique_ptr<WebPage>> WebPage::Start(const std::string& listen, const Metrics* metrics,
                                                        const RecentErrors* errors, const Clock* clock,
                                                        DashboardFacts facts, std::vector<std::string> hosts,
                                                        int inherited) {
  std::unique_ptr<WebPage> page(new WebPage(metrics, errors, std::move(facts)));
  const auto file = [](const char* type, const char* content) {
    return File{type, std::make_shared<const std::string>(content)};
  };
  HttpServer::Options options;
  options.listen = listen;
  options.inherited = inherited;
  options.answers_host = [loopback = IsLoopbackAddress(listen), hosts = std::move(hosts)](absl::string_view host) {
    return loopback && hosts.empty() ? IsLoopbackHost(host) : IsOwnHost(host, hosts);
  };
  options.handler = [dashboard = &page->dashboard_, html = file("text/html; charset=utf-8", page_files::kHtml),
                     css = file("text/css; charset=utf-8", page_files::kCss),
                     js = file("text/javascript; charset=utf-8", page_files::kJs)](absl::string_view path) {
    if (path == "/") return HttpAnswer{200, html.type, html.content};
    if (path == "/page.css") return HttpAnswer{200, css.type, css.content};
    if (path == "/page.js") return HttpAnswer{200, js.type, js.content};
    if (path == "/state.json") return HttpAnswer{200, "application/json", dashboard->Json()};
    return HttpAnswer{};
  };
  options.tick = [dashboard = &page->dashboard_, clock] { dashboard->Sample(clock->NowNs(), UnixMs()); };
  KV_ASSIGN_OR_RETURN(page->server_, HttpServer::Start(std::move(options)));
  return page;
}

}  // namespace kvmanager
